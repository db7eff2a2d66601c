"""A request of the Messages API as a chat: blocks become messages, fields take the names of Chat Completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, ClassVar

import orjson
from pydantic import ConfigDict

from tessera.app.anthropic.schema import (
    ContentBlock,
    MessagesPrompt,
    MessagesRequest,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tessera.app.schema.chat import ChatMessage, ChatRequest, ToolCall, ToolCallFunction
from tessera.app.schema.fields import TextPart
from tessera.app.schema.generation_fields import SamplingFields


class MessagesChat(ChatRequest):
    """The chat that a request amounts to; its fields have been checked under the names of the Messages API."""

    model_config = ConfigDict(defer_build=True)  # never validated
    response_format_param: ClassVar[str] = "output_config.format"


def chat_prompt(request: MessagesPrompt) -> MessagesChat:
    """The part of the chat that decides the prompt."""
    return MessagesChat.model_construct(**_prompt_fields(request))


def chat_request(request: MessagesRequest) -> MessagesChat:
    """The chat that the request amounts to."""
    sampling: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.model_fields}
    sampling["stop"] = (*request.stop, *(request.stop_sequences or ()))
    return MessagesChat.model_construct(
        **sampling,
        **_prompt_fields(request),
        max_tokens=request.max_tokens,
        response_format=request.response_format,
    )


def _prompt_fields(request: MessagesPrompt) -> dict[str, Any]:
    messages = [ChatMessage(role="system", content=request.system)] if request.system else []
    for role, neighbours in groupby(request.messages, key=lambda message: message.role):
        blocks = [block for message in neighbours for block in message.content]
        messages += _assistant_messages(blocks) if role == "assistant" else _other_messages(role, blocks)
    choice = request.tool_choice
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        kwargs.setdefault("enable_thinking", request.thinking.type != "disabled")
    last = messages[-1]
    return {
        "model": request.model,
        "messages": messages,
        "tools": [tool.for_chat() for tool in request.tools or ()],
        "tool_choice": choice.for_chat() if choice is not None else None,
        "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
        "chat_template_kwargs": kwargs or None,
        "continue_final_message": last.role == "assistant" and not last.tool_calls,
    }


def _assistant_messages(blocks: Iterable[ContentBlock]) -> Iterator[ChatMessage]:
    blocks = list(blocks)
    calls = [
        ToolCall(id=block.id, function=ToolCallFunction(name=block.name, arguments=orjson.dumps(block.input).decode()))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    texts = [block.text for block in blocks if isinstance(block, TextPart)]
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    yield ChatMessage(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        tool_calls=calls or None,
        reasoning="\n".join(reasoning) if reasoning else None,
    )


def _other_messages(role: str, blocks: Iterable[ContentBlock]) -> Iterator[ChatMessage]:
    """Tool results as messages of their own, before the text that came with them."""
    blocks = list(blocks)
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = block.content
            if block.is_error and not content.lower().startswith("error"):
                content = f"Error: {content}"
            yield ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)
    texts = [block.text for block in blocks if isinstance(block, TextPart)]
    if texts:
        yield ChatMessage.model_validate({"role": role, "content": "\n".join(texts)})
