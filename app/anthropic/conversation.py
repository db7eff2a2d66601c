"""A request of the Messages API as a chat: blocks become messages, fields take the names of Chat Completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import orjson
from fastapi import Request
from pydantic import ConfigDict

from tessera.app.anthropic.blocks import (
    ContentBlock,
    Effort,
    KnownTool,
    Message,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of_blocks,
)
from tessera.app.anthropic.schema import MessagesPrompt, MessagesRequest
from tessera.app.generate.prompt import ChatPrompt, render_chat
from tessera.app.generate.served_model import ServedModel
from tessera.app.http.body import run_in_turn
from tessera.app.schema.chat import ChatMessage, ChatRequest, ToolCall, ToolCallFunction
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.tools import Tool
from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError

Unseal: TypeAlias = Callable[[str], str | None]


class MessagesChat(ChatRequest):
    """The chat that a request amounts to; its fields have been checked under the names of the Messages API."""

    model_config = ConfigDict(defer_build=True)  # never validated
    response_format_param: ClassVar[str] = "output_config.format"
    always_clamps: ClassVar[bool] = True


@dataclass(slots=True)
class PreparedChat:
    """A request as a chat, with its history shortened as it asked for.

    Attributes:
        applied_edits: reports of the edits of the history; None where the request asked for none.
        num_original_tokens: of the prompt before the edits.
    """

    chat: MessagesChat
    prompt: ChatPrompt
    applied_edits: list[dict[str, Any]] | None
    num_original_tokens: int


async def prepare_chat(
    http_request: Request, model: ServedModel, request: MessagesPrompt, unseal: Unseal
) -> PreparedChat:
    """The chat that the request amounts to, and its prompt.

    Args:
        unseal: the reasoning behind a signature; None where it cannot be read.

    Raises:
        RequestError: the request cannot be combined so, or the template cannot render it.
    """

    def checked(messages: Sequence[Message]) -> tuple[list[Message], MessagesChat]:
        unsealed = [_unsealed(message, unseal) for message in messages]
        chat = _chat_of(request, unsealed)
        chat.check()
        return unsealed, chat

    async def chat_of(messages: Sequence[Message]) -> MessagesChat:
        return await run_in_turn(http_request, partial(_chat_of, request), messages)

    given, chat = await run_in_turn(http_request, checked, request.messages)
    if request.context_management is None:
        prompt = await render_chat(model, chat)
        return PreparedChat(chat, prompt, None, len(prompt.token_ids))
    prompts: dict[int, ChatPrompt] = {}

    async def count_tokens(messages: Sequence[Message]) -> int:
        """Tokens of the prompt with these messages; one that is too long to be rendered counts as a full context."""
        try:
            prompt = prompts[id(messages)] = await render_chat(model, await chat_of(messages))
        except ContextLengthError:
            return model.info.max_model_len
        return len(prompt.token_ids)

    messages, applied = await request.context_management.edit(given, count_tokens)
    if applied:
        chat = await chat_of(messages)
    prompt = prompts.get(id(messages)) or await render_chat(model, chat)
    cleared = sum(edit["cleared_input_tokens"] for edit in applied)
    return PreparedChat(chat, prompt, applied, len(prompt.token_ids) + cleared)


def _unsealed(message: Message, unseal: Unseal) -> Message:
    """The message with the reasoning that was omitted."""
    if not any(isinstance(block, ThinkingBlock) and not block.thinking for block in message.content):
        return message
    blocks = [
        block.model_copy(update={"thinking": unseal(block.signature or "") or ""})
        if isinstance(block, ThinkingBlock) and not block.thinking
        else block
        for block in message.content
    ]
    return message.model_copy(update={"content": blocks})


def _chat_of(request: MessagesPrompt, messages: Sequence[Message]) -> MessagesChat:
    """The chat that the request amounts to with these messages."""
    fields = _prompt_fields(request, messages)
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in SamplingFields.model_fields}
        fields["stop"] = (*request.stop, *(request.stop_sequences or ()))
        fields["max_tokens"] = request.max_tokens
        fields["thinking_token_budget"] = _thinking_budget(request)
        fields["stream"] = request.stream
        fields["response_format"] = request.response_format
    return MessagesChat.model_construct(**fields)


def _prompt_fields(request: MessagesPrompt, conversation: Sequence[Message]) -> dict[str, Any]:
    messages = [ChatMessage(role="system", content=request.system)] if request.system else []
    for role, neighbours in groupby(_shown(conversation), key=lambda message: message.role):
        blocks = [block for message in neighbours for block in message.content]
        messages += _assistant_messages(blocks) if role == "assistant" else _other_messages(role, blocks)
    if not messages:
        raise InvalidRequestError("messages has nothing that the model could read.", param="messages")
    choice = request.tool_choice
    last = messages[-1]
    return {
        "model": request.model,
        "messages": messages,
        "tools": _offered_tools(request, conversation),
        "tool_choice": choice.for_chat() if choice is not None else None,
        "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
        "chat_template_kwargs": _template_kwargs(request, _effort(request, conversation)) or None,
        "continue_final_message": last.role == "assistant" and not last.tool_calls,
    }


def _thinking_budget(request: MessagesPrompt) -> int | None:
    """Most tokens of reasoning: none where it is to be off, although the template may not be able to turn it off."""
    if request.thinking is None:
        return None
    return request.thinking.budget_tokens if request.thinks else 0


def _shown(conversation: Sequence[Message]) -> list[Message]:
    """Without the system messages that are cleared at a later message of the user's."""
    newest = max((index for index, message in enumerate(conversation) if message.role == "user"), default=-1)
    return [
        message
        for index, message in enumerate(conversation)
        if message.role != "system" or message.clear_at != "next_user_message" or index > newest
    ]


def _offered_tools(request: MessagesPrompt, conversation: Iterable[Message]) -> list[Tool]:
    """The request's tools with those that its messages add, and without those that they remove."""
    known = {tool.name: tool for tool in request.tools or ()}
    offered = dict(known)
    for block in (block for message in conversation for block in message.content):
        if not isinstance(block, ToolAdditionBlock | ToolRemovalBlock):
            continue
        name = block.tool.name if isinstance(block.tool, KnownTool) else ""
        if isinstance(block.tool, ToolDefinition) and block.tool.definition is not None:
            name = block.tool.definition.name
            known[name] = block.tool.definition
        if isinstance(block, ToolRemovalBlock):
            offered.pop(name, None)
        elif name in known:
            offered[name] = known[name]
    return [tool.for_chat() for tool in offered.values()]


def _effort(request: MessagesPrompt, conversation: Sequence[Message]) -> Effort | None:
    """That of the newest system message of this turn, else the request's."""
    for message in reversed(conversation):
        if message.output_config is not None and message.output_config.effort is not None:
            return message.output_config.effort
        if message.role == "user" and any(block.type != "tool_result" for block in message.content):
            break
    return request.output_config.effort if request.output_config is not None else None


def _template_kwargs(request: MessagesPrompt, effort: Effort | None) -> dict[str, Any]:
    """The request's own, over those that its thinking and effort amount to."""
    kwargs: dict[str, Any] = {}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    if request.thinks is not None:
        kwargs["enable_thinking"] = kwargs["thinking"] = request.thinks
    return {**kwargs, **(request.chat_template_kwargs or {})}


def _assistant_messages(blocks: Iterable[ContentBlock]) -> Iterator[ChatMessage]:
    blocks = list(blocks)
    calls = [
        ToolCall(id=block.id, function=ToolCallFunction(name=block.name, arguments=orjson.dumps(block.input).decode()))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    texts = [text for block in blocks if (text := text_of_blocks([block]))]
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    # Not validated again: several messages in a row make one that may be beyond a single message's bounds.
    yield ChatMessage.model_construct(
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
            content = block.text
            if block.is_error and not content.lower().startswith("error"):
                content = f"Error: {content}"
            yield ChatMessage.model_construct(role="tool", content=content, tool_call_id=block.tool_use_id)
    text = text_of_blocks(blocks)
    silent = ToolResultBlock | ToolAdditionBlock | ToolRemovalBlock
    if text or (blocks and not any(isinstance(block, silent) for block in blocks)):
        yield ChatMessage.model_construct(role=role, content=text)
