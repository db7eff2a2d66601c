"""The chat completion object and its choices, whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Generation
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.envelope import CompletionHead, usage_object
from tessera.app.openai.logprobs import chat_logprobs, prompt_logprobs
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning


def chat_completion(
    head: CompletionHead,
    request: ChatCompletionRequest,
    prompt_token_ids: list[int],
    generation: Generation,
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The response to a request that does not stream."""
    response = head.as_dict("chat.completion")
    response["choices"] = [
        _choice(request, index, completion, tokenizer) for index, completion in enumerate(completions)
    ]
    response["usage"] = usage_object(generation.usage())
    if request.prompt_logprobs is not None:
        found = generation.prompt_logprobs(0)
        response["prompt_logprobs"] = prompt_logprobs(found, tokenizer, request.prompt_logprobs)
    if request.return_token_ids:
        response["prompt_token_ids"] = prompt_token_ids
    return response


def chat_message(text: str, parts: Sequence[Part] | None) -> dict[str, Any]:
    """`message` of a choice. `parts` is the text as it was read; None where all of it is content."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if parts is None:
        return message
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    calls = tool_calls(parts)
    message["content"] = content or (None if calls or reasoning else "")
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def tool_calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The calls of a completion, each with all of its arguments."""
    starts = [part for part in parts if isinstance(part, CallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    return [
        {
            "id": start.id,
            "type": "function",
            "function": {"name": start.name, "arguments": "".join(arguments[start.index])},
        }
        for start in starts
    ]


def _choice(request: ChatCompletionRequest, index: int, completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if request.num_logprobs is not None:
        logprobs = chat_logprobs(completion.entries, tokenizer, request.num_logprobs)
    choice: dict[str, Any] = {
        "index": index,
        "message": chat_message(completion.text, completion.parts),
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice
