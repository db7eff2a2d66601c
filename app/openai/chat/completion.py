"""The chat completion object and its choices, whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Generation
from tessera.app.openai.chat.calls import PLAIN_CALLS, CallForm
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.envelope import CompletionHead, usage_object
from tessera.app.openai.logprobs import chat_logprobs, prompt_logprobs
from tessera.app.schema.chat import ChatMessage
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.tools.parts import Content, Part, Reasoning


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
    form = CallForm.of(request)
    response["choices"] = [
        _choice(request, form, index, completion, tokenizer) for index, completion in enumerate(completions)
    ]
    response["usage"] = usage_object(generation.usage())
    if request.prompt_logprobs is not None:
        found = generation.prompt_logprobs(0)
        response["prompt_logprobs"] = prompt_logprobs(found, tokenizer, request.prompt_logprobs)
    if request.return_token_ids:
        response["prompt_token_ids"] = prompt_token_ids
    return response


def chat_message(
    text: str, parts: Sequence[Part] | None, form: CallForm = PLAIN_CALLS, echoed: str = ""
) -> dict[str, Any]:
    """`message` of a choice.

    Args:
        parts: the text as it was read; None where all of it is content.
        echoed: the text before it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": echoed + text, "refusal": None, "annotations": []}
    if parts is None:
        return message
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = echoed + "".join(part.text for part in parts if isinstance(part, Content))
    calls = form.message_fields(parts)
    message["content"] = content or (None if calls or reasoning else "")
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    return message | calls


def stored_messages(completion_id: str, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages of a request as those of its stored completion are listed."""
    return [
        {"id": f"{completion_id}-{number}", "content": None, **message.model_dump(exclude_none=True)}
        for number, message in enumerate(messages)
    ]


def _choice(
    request: ChatCompletionRequest, form: CallForm, index: int, completion: Completion, tokenizer: Tokenizer
) -> dict[str, Any]:
    logprobs = None
    if request.num_logprobs is not None:
        as_ids = request.return_tokens_as_token_ids
        logprobs = chat_logprobs(completion.entries, tokenizer, request.num_logprobs, as_ids=as_ids)
    choice: dict[str, Any] = {
        "index": index,
        "message": chat_message(completion.text, completion.parts, form, request.echoed),
        "logprobs": logprobs,
        "finish_reason": form.finish_reason(completion.finish_reason),
    }
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice
