"""The text completion object and its choices, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Generation
from tessera.app.openai.completions.logprobs import Echo, completion_logprobs, echo_logprobs, joined_logprobs
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.envelope import CompletionHead, usage_object
from tessera.app.openai.logprobs import prompt_logprobs
from tessera.app.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class ChoicePrompts:
    """The prompt as each choice reports it, by the choice's index; None where the request does not ask for it."""

    echoes: list[Echo] | None
    token_ids: list[list[int]] | None


def text_completion(
    head: CompletionHead,
    request: CompletionRequest,
    prompts: ChoicePrompts,
    generation: Generation,
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The response to a request that does not stream."""
    choices = [
        _choice(request, index, completion, prompts, generation, tokenizer)
        for index, completion in enumerate(completions)
    ]
    return {**head.as_dict("text_completion"), "choices": choices, "usage": usage_object(generation.usage())}


def _choice(
    request: CompletionRequest,
    index: int,
    completion: Completion,
    prompts: ChoicePrompts,
    generation: Generation,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    echo = prompts.echoes[index] if prompts.echoes is not None else None
    choice: dict[str, Any] = {
        "text": completion.text if echo is None else echo.text + completion.text,
        "index": index,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
    }
    if request.num_logprobs is not None:
        logprobs = completion_logprobs(completion.entries, tokenizer, request.num_logprobs)
        if echo is not None:
            found = generation.prompt_logprobs(index)
            logprobs = joined_logprobs(echo_logprobs(echo, found, tokenizer, request.num_logprobs), logprobs)
        choice["logprobs"] = logprobs
    if request.prompt_logprobs is not None:
        found = generation.prompt_logprobs(index)
        choice["prompt_logprobs"] = prompt_logprobs(found, tokenizer, request.prompt_logprobs)
    if prompts.token_ids is not None:
        choice["prompt_token_ids"] = prompts.token_ids[index]
        choice["token_ids"] = completion.token_ids
    return choice
