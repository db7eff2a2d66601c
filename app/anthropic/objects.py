"""Models of the message object, its events and errors, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, RootModel

from tessera.app.http.description import ApiObject

StopReasonName: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageErrorDetails(ApiObject):
    error_code: str
    unsupported: list[str]


class MessageErrorFields(ApiObject):
    type: str
    message: str
    details: MessageErrorDetails | None = Field(default=None, description="Only where `thread` is refused.")


class MessageErrorObject(ApiObject):
    """Any failure, in Anthropic's form."""

    type: Literal["error"]
    error: MessageErrorFields


class TextBlockObject(ApiObject):
    type: Literal["text"]
    text: str


class ThinkingBlockObject(ApiObject):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseObject(ApiObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlockObject: TypeAlias = Annotated[
    TextBlockObject | ThinkingBlockObject | ToolUseObject, Field(discriminator="type")
]


class MessageUsage(ApiObject):
    """`input_tokens` leaves out those that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ClearedToolUses(ApiObject):
    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: int
    cleared_input_tokens: int


class ClearedThinking(ApiObject):
    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int


class AppliedEdits(ApiObject):
    """Only where the request has `context_management`."""

    applied_edits: list[Annotated[ClearedToolUses | ClearedThinking, Field(discriminator="type")]]


class MessageObject(ApiObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlockObject]
    stop_reason: StopReasonName | None = Field(description="null only in message_start.")
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class OriginalTokenCount(ApiObject):
    original_input_tokens: int


class TokenCount(ApiObject):
    """`context_management` only where the request has it."""

    input_tokens: int
    context_management: OriginalTokenCount | None = None


class MessageStart(ApiObject):
    type: Literal["message_start"]
    message: MessageObject


class Ping(ApiObject):
    type: Literal["ping"]


class ContentBlockStart(ApiObject):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlockObject


class TextDelta(ApiObject):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ApiObject):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(ApiObject):
    type: Literal["input_json_delta"]
    partial_json: str


class SignatureDelta(ApiObject):
    type: Literal["signature_delta"]
    signature: str


class ContentBlockDelta(ApiObject):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(ApiObject):
    type: Literal["content_block_stop"]
    index: int


class StopFields(ApiObject):
    stop_reason: StopReasonName
    stop_sequence: str | None


class MessageDeltaEvent(ApiObject):
    type: Literal["message_delta"]
    delta: StopFields
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class MessageStop(ApiObject):
    type: Literal["message_stop"]


class MessageEvent(RootModel[Any]):
    """The data of an event."""

    model_config = ConfigDict(defer_build=True)
    root: Annotated[
        MessageStart
        | Ping
        | ContentBlockStart
        | ContentBlockDelta
        | ContentBlockStop
        | MessageDeltaEvent
        | MessageStop
        | MessageErrorObject,
        Field(discriminator="type"),
    ]
