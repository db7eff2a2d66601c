"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tessera.app.schema.fields import MAX_CHOICES, MAX_INT32, Off, Prompts, integer
from tessera.app.schema.generation_fields import ALL_LOGPROBS, GenerationRequest
from tessera.app.schema.request import FieldValues
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import MAX_LOGPROBS


class CompletionRequest(GenerationRequest):
    """One or several prompts, `n` completions each; choices are numbered prompt by prompt."""

    refused: ClassVar[FieldValues] = {**GenerationRequest.refused, "suffix": ("",), "thinking_token_budget": (-1,)}

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 64},
        "several": {"model": "MODEL", "prompt": ["One", "Two"], "n": 2, "temperature": 0.7, "seed": 1},
    }

    prompt: Prompts
    max_tokens: int | None = integer(
        0,
        MAX_INT32,
        "Most tokens to generate; the rest of the context if omitted; 0 only with echo or prompt_logprobs.",
    )
    echo: Off = False
    logprobs: int | None = integer(0, MAX_LOGPROBS, "Alternatives to report per token.")
    best_of: int | None = integer(1, MAX_CHOICES, "Must equal n.")

    @property
    def num_logprobs(self) -> int | None:
        return None if self.logprobs is None else max(len(self.logprob_token_ids), self.logprobs)

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs == ALL_LOGPROBS:
            return ALL_LOGPROBS
        asked = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(asked, default=None)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must equal n ({self.num_choices}): choosing among more is not supported.",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens must be at least 1, or 0 together with echo or prompt_logprobs.", param="max_tokens"
            )
