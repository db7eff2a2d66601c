"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from app.protocol.common import GenerationRequest, Off
from app.protocol.fields import MAX_CHOICES, Prompts, integer
from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_LOGPROBS


class CompletionRequest(GenerationRequest):
    """One or several prompts, `n` answers each; choices are numbered prompt by prompt."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**GenerationRequest.refused, "suffix": ("",)}

    prompt: Prompts
    echo: Off = False
    logprobs: int | None = integer(0, MAX_LOGPROBS, "Alternatives to report per token.")
    best_of: int | None = integer(1, MAX_CHOICES, "Must equal n.")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must equal n ({self.num_choices}): choosing among more is not supported.",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "logprobs together with echo is not supported: the prompt's own logprobs are not computed.",
                param="logprobs",
            )
