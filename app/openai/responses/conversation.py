"""A request of the Responses API as a chat: items become messages, fields take the names of Chat Completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from pydantic import ConfigDict, TypeAdapter

from tessera.app.openai.conversations.items import (
    SETTINGS,
    AdditionalToolsItem,
    ConfigurationUpdateItem,
    CustomCallItem,
    CustomCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    LocalShellCallItem,
    LocalShellCallOutputItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
)
from tessera.app.openai.conversations.tools import OfferedTools, offered_name
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.schema.chat import ChatMessage, ChatRequest, ToolCall, ToolCallFunction
from tessera.app.schema.custom_tools import arguments_of
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.request import log_once

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])

Unseal = Callable[[str], str | None]  # the text behind `encrypted_content`; None where it cannot be read

_CALLS = (FunctionCallItem, CustomCallItem, LocalShellCallItem)
_RESULTS = (FunctionCallOutputItem, CustomCallOutputItem, LocalShellCallOutputItem)


@dataclass(slots=True)
class _AssistantTurn:
    """One assistant message, gathered from neighbouring items: reasoning, then text, then calls."""

    reasoning: list[str] = field(default_factory=list)
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def is_begun(self) -> bool:
        return self.content is not None or bool(self.calls)

    def message(self) -> ChatMessage:
        return ChatMessage(
            role="assistant",
            content=self.content if self.content is not None or self.calls else "",
            tool_calls=self.calls or None,
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
        )


class ResponsesChat(ChatRequest):
    """The chat that a request amounts to; its fields have been checked under the names of the Responses API."""

    model_config = ConfigDict(defer_build=True)  # never validated
    response_format_param: ClassVar[str] = "text.format"

    @property
    def token_limit(self) -> tuple[int | None, str]:
        return self.max_completion_tokens, "max_output_tokens"


def configured(request: ResponsesRequest, items: Iterable[InputItem]) -> ResponsesRequest:
    """The request with the settings of its items in effect."""
    tools = list(request.tools or ())
    changed: dict[str, Any] = {}
    for item in items:
        if isinstance(item, AdditionalToolsItem):
            tools += item.tools
        elif isinstance(item, ConfigurationUpdateItem):
            if item.reasoning is not None and item.reasoning.effort is not None:
                changed["reasoning"] = item.reasoning
            if item.text is not None and item.text.format is not None:
                changed["text"] = item.text
    return request.model_copy(update={**changed, "tools": tools})


def chat_request(
    request: ResponsesRequest, offered: OfferedTools, conversation: Sequence[ChatMessage]
) -> ResponsesChat:
    """`conversation` after the request's instructions, if it has any."""
    instructions = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    shared: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.model_fields}
    return ResponsesChat.model_construct(
        **shared,
        model=request.model,
        messages=[*instructions, *conversation],
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs,
        tools=offered.functions,
        tool_choice=request.chat_tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning_effort,
        response_format=request.response_format,
    )


def without_oldest(chat: ResponsesChat, num_dropped: int) -> ResponsesChat:
    """The chat without its oldest messages, where `num_dropped` is one of `cuts`."""
    instructions = chat.messages[: _num_instructions(chat)]
    return chat.model_copy(update={"messages": [*instructions, *chat.messages[len(instructions) + num_dropped :]]})


def cuts(chat: ResponsesChat) -> list[int]:
    """Numbers of oldest messages whose removal leaves a rest that begins with the user, in ascending order."""
    rest = chat.messages[_num_instructions(chat) :]
    return [0, *(index for index, message in enumerate(rest) if index > 0 and message.role == "user")]


def _num_instructions(chat: ResponsesChat) -> int:
    """The number of messages at the beginning that are always kept."""
    for index, message in enumerate(chat.messages):
        if message.role not in ("system", "developer"):
            return index
    return len(chat.messages)


def messages_of(items: Iterable[InputItem], unseal: Unseal) -> list[ChatMessage]:
    """Each item as a message; the items of one assistant turn become one message.

    What the model cannot use is left out, and the log says so once for each type.
    """
    messages: list[ChatMessage] = []
    turn: _AssistantTurn | None = None
    for item in items:
        if isinstance(item, OtherItem):
            log_once(f"item {item.type}", "input items of type %s are left out of prompts", item.type)
            continue
        if isinstance(item, SETTINGS):
            continue
        begins_turn = isinstance(item, ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant")
        continues_turn = begins_turn or isinstance(item, _CALLS)
        if turn is not None and (not continues_turn or (begins_turn and turn.is_begun)):
            messages.append(turn.message())
            turn = None
        if continues_turn:
            turn = turn or _AssistantTurn()
            _extend(turn, item, unseal)
        elif isinstance(item, _RESULTS):
            messages.append(_result(item))
        elif isinstance(item, MessageItem):
            messages.append(ChatMessage(role=item.role, content=item.content))
    if turn is not None:
        messages.append(turn.message())
    return messages


def messages_of_output(output: list[dict[str, object]], unseal: Unseal) -> list[ChatMessage]:
    """The items of a response as the messages that the next request begins with."""
    return messages_of(ITEMS.validate_python(output), unseal)


def _extend(turn: _AssistantTurn, item: InputItem, unseal: Unseal) -> None:
    if isinstance(item, ReasoningItem):
        text = item.content or _unsealed(item, unseal) or item.summary
        if text:
            turn.reasoning.append(text)
    elif isinstance(item, MessageItem):
        turn.content = item.content if turn.content is None else f"{turn.content}\n{item.content}"
    elif isinstance(item, FunctionCallItem):
        turn.calls.append(_call(item.call_id, offered_name(item.name, item.namespace), item.arguments))
    elif isinstance(item, CustomCallItem):
        turn.calls.append(_call(item.call_id, offered_name(item.name, item.namespace), arguments_of(item.input)))
    elif isinstance(item, LocalShellCallItem):
        action = {name: value for name, value in item.action.items() if name != "type"}
        turn.calls.append(_call(item.call_id or item.id or "", "local_shell", orjson.dumps(action).decode()))


def _call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=ToolCallFunction(name=name, arguments=arguments))


def _result(item: InputItem) -> ChatMessage:
    assert isinstance(item, _RESULTS)
    name = offered_name(item.name, item.namespace) if isinstance(item, FunctionCallOutputItem) and item.name else None
    return ChatMessage(role="tool", content=item.output, name=name, tool_call_id=item.call_id or item.id or "")


def _unsealed(item: ReasoningItem, unseal: Unseal) -> str | None:
    if not item.encrypted_content:
        return None
    text = unseal(item.encrypted_content)
    if text is None:
        log_once("encrypted_content", "reasoning that this server has not sealed is left out of prompts")
    return text
