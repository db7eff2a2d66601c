"""Messages of /api/chat, and the same as Chat Completions has them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tessera.app.schema.chat import MAX_TOOL_CALLS, ChatMessage, ToolCall, ToolCallFunction
from tessera.app.schema.fields import MAX_NAME, MAX_PARTS, JsonObject, Text
from tessera.app.schema.request import log_once
from tessera.engine.contract.errors import InvalidRequestError

IMAGE_LEFT_OUT = "[An image was left out: this model reads text only.]"


def _empty_for_null(value: Any) -> Any:
    return "" if value is None else value


Content = Annotated[Text, BeforeValidator(_empty_for_null, json_schema_input_type=Text | None)]
Images = Annotated[list[Text], Field(max_length=MAX_PARTS, description="Not for text models.")]


class OllamaFunction(BaseModel):
    """The function that was called, its arguments as an object."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: str = Field(max_length=MAX_NAME)
    arguments: JsonObject = {}


class OllamaCall(BaseModel):
    """A call that the assistant made earlier."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    id: str | None = Field(default=None, max_length=MAX_NAME)
    function: OllamaFunction


class OllamaMessage(BaseModel):
    """One message; a tool's result names the tool, or the call where calls have ids."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    thinking: Text | None = None
    images: Images | None = None
    tool_calls: list[OllamaCall] | None = Field(default=None, max_length=MAX_TOOL_CALLS)
    tool_name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_call_id: str | None = Field(default=None, max_length=MAX_NAME)


def check_images(messages: Sequence[OllamaMessage]) -> None:
    """Refuse a conversation that begins with an image. Later on a refusal would end a session."""
    if any(message.role == "assistant" for message in messages):
        return
    for index, message in enumerate(messages):
        if message.images:
            path = f"messages[{index}].images"
            raise InvalidRequestError(f"{path} cannot be used: this model reads text only.", param=path)


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The messages of Chat Completions, in which each call has an id and each result names its call."""
    found = []
    waiting = CallsWithoutResult()
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.tool_calls or ():
            function = ToolCallFunction(
                name=call.function.name, arguments=orjson.dumps(call.function.arguments).decode()
            )
            calls.append(ToolCall(id=call.id or f"call{num_calls:05}", function=function))
            num_calls += 1
        call_id = None
        if message.role == "tool":
            call_id = message.tool_call_id or waiting.take(message.tool_name)
        waiting.extend(calls)
        # Not validated again: the texts have been.
        found.append(
            ChatMessage.model_construct(
                role=message.role,
                content=_content(message),
                name=message.tool_name,
                reasoning=message.thinking,
                tool_calls=calls or None,
                tool_call_id=call_id,
            )
        )
    return found


def _content(message: OllamaMessage) -> str:
    if not message.images:
        return message.content
    log_once("ollama images", "images are left out of prompts: the model reads text only")
    return "\n".join(filter(None, (message.content, *[IMAGE_LEFT_OUT] * len(message.images))))


class CallsWithoutResult:
    """Calls in their order, found by their tool; each step takes constant time."""

    def __init__(self) -> None:
        self._all: OrderedDict[int, ToolCall] = OrderedDict()
        self._by_tool: defaultdict[str, deque[int]] = defaultdict(deque)
        self._num_calls = 0

    def extend(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self._all[self._num_calls] = call
            self._by_tool[call.function.name].append(self._num_calls)
            self._num_calls += 1

    def take(self, tool: str | None) -> str:
        """The id of the first call of the tool, or else of any; it has a result now."""
        named = self._by_tool.get(tool) if tool is not None else None
        if named:
            return self._all.pop(named.popleft()).id
        if not self._all:
            return "call00000"
        _, call = self._all.popitem(last=False)
        self._by_tool[call.function.name].popleft()
        return call.id
