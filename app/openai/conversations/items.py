"""Input items of the Responses API: messages, calls and their results, reasoning, and what the model cannot use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tessera.app.openai.conversations.configuration import ReasoningConfig, TextConfig
from tessera.app.openai.conversations.tools import ResponseTool
from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.schema.fields import MAX_NAME, MAX_PARTS, Entries, JsonObject, Text, at_most, text_of, wrong
from tessera.app.schema.tools import MAX_TOOLS
from tessera.engine.contract.errors import InvalidRequestError

TEXT_KEYS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
# What a text model cannot read. In a conversation that goes on, to refuse it would end the session.
LEFT_OUT_PARTS = (
    "input_image",
    "input_file",
    "input_audio",
    "computer_screenshot",
    "image",
    "file",
    "encrypted_content",
)
LEFT_OUT = "[A part of type {kind} was left out: this model reads text only.]"


class InputText(BaseModel):
    """A part with text. Images, files and audio are not read, and nothing is fetched."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


ItemText = Text | Annotated[Entries[InputText], Field(max_length=MAX_PARTS)]


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value, TEXT_KEYS)


def _text_around(value: Any) -> str:
    """The text of parts, with a sentence in place of each that cannot be read."""
    if type(value) is list:
        value = [_readable(part) for part in value]
    return text_of(value, TEXT_KEYS)


def _readable(part: Any) -> Any:
    kind = _unreadable_type(part)
    return {"type": "text", "text": LEFT_OUT.format(kind=kind)} if kind is not None else part


def _unreadable_type(part: Any) -> str | None:
    kind = part.get("type") if type(part) is dict else None
    return kind if kind in LEFT_OUT_PARTS else None


OptionalText = Annotated[str | None, PlainValidator(_text_or_none, json_schema_input_type=ItemText | None)]
PartsText = Annotated[str, PlainValidator(_text_around, json_schema_input_type=ItemText)]


class Item(BaseModel):
    """Base of the input items. Their states, which outputs have too, are accepted and not needed."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    id: str | None = Field(default=None, max_length=MAX_NAME)


class MessageItem(Item):
    """A message; `type` may be omitted."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: PartsText
    _unreadable: str | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _note_unreadable(cls, value: Any, handler: ModelWrapValidatorHandler[MessageItem]) -> MessageItem:
        message = handler(value)
        content = value.get("content") if isinstance(value, dict) else None
        if type(content) is list:
            message._unreadable = next(filter(None, map(_unreadable_type, content)), None)
        return message

    @property
    def unreadable(self) -> str | None:
        """The type of a part that the model cannot read, if it has one."""
        return self._unreadable


class FunctionCallItem(Item):
    """A call that the model made earlier; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    namespace: str | None = Field(default=None, max_length=MAX_NAME)
    arguments: Text = ""


class FunctionCallOutputItem(Item):
    """The result of the call `call_id`, or what the tool `name` has to say without one."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["call_id"]}, {"required": ["name"]}]})

    type: Literal["function_call_output"]
    name: str | None = Field(default=None, max_length=MAX_NAME)
    namespace: str | None = Field(default=None, max_length=MAX_NAME)
    call_id: str | None = Field(default=None, max_length=MAX_NAME, validate_default=True)
    output: PartsText

    @field_validator("call_id")
    @classmethod
    def _of_a_call_or_a_tool(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("name") is None:
            raise wrong("is required where there is no name of a tool")
        return call_id


class CustomCallItem(Item):
    """The call of a custom tool that the model made earlier."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    namespace: str | None = Field(default=None, max_length=MAX_NAME)
    input: Text = ""


class CustomCallOutputItem(Item):
    """The result of the custom tool's call `call_id`."""

    type: Literal["custom_tool_call_output"]
    call_id: str = Field(max_length=MAX_NAME)
    output: PartsText


class LocalShellCallItem(Item):
    """A command that another model had the client run."""

    type: Literal["local_shell_call"]
    call_id: str = Field(default="", max_length=MAX_NAME)
    action: JsonObject


class LocalShellCallOutputItem(Item):
    """The result of a command; without `call_id` it belongs to the call `id`."""

    type: Literal["local_shell_call_output"]
    call_id: str | None = Field(default=None, max_length=MAX_NAME)
    output: PartsText


class ReasoningItem(Item):
    """Reasoning that preceded the next item: its text, or the `encrypted_content` that this server gave out."""

    type: Literal["reasoning"]
    content: OptionalText = None
    summary: OptionalText = None
    encrypted_content: Text | None = None


class ItemReference(Item):
    """An output item of a stored response; `type` may be omitted."""

    type: Annotated[Literal["item_reference"], BeforeValidator(lambda kind: kind or "item_reference")] = (
        "item_reference"
    )
    id: str = Field(max_length=MAX_NAME)


class AdditionalToolsItem(Item):
    """Tools beside those of the request, as Codex sends all of its own."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: Entries[ResponseTool] = Field(max_length=MAX_TOOLS)


class ConfigurationUpdateItem(Item):
    """The effort and the format from here on, in place of the request's."""

    type: Literal["configuration_update"]
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None


class OtherItem(Item):
    """An item of a hosted tool, or another server's summary: taken, and left out of the prompt."""

    type: Literal[
        "compaction",
        "compaction_summary",
        "context_compaction",
        "program",
        "program_output",
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "tool_search_call",
        "tool_search_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
    ]


SETTINGS = (AdditionalToolsItem, ConfigurationUpdateItem)
OTHER_TYPES = frozenset(OtherItem.model_fields["type"].annotation.__args__)  # type: ignore[union-attr]


def _item_type(item: Any) -> str | None:
    if not isinstance(item, dict):
        kind = getattr(item, "type", None)
    else:
        kind = item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")
    if type(kind) is not str:
        return None
    return "other" if kind in OTHER_TYPES else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutputItem, Tag("local_shell_call_output")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ConfigurationUpdateItem, Tag("configuration_update")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_type),
]
InputItems = Annotated[Entries[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES)]


def check_readable(items: Sequence[InputItem]) -> None:
    """Raise InvalidRequestError for images and files in the messages that begin a conversation.

    Later on they stand in the history that a client sends again and again: they are left out of the prompt.
    """
    if any(not isinstance(item, (MessageItem, *SETTINGS)) or _is_answer(item) for item in items):
        return
    for index, item in enumerate(items):
        if isinstance(item, MessageItem) and item.unreadable is not None:
            path = f"input[{index}].content"
            raise InvalidRequestError(
                f"{path} has a part of type '{item.unreadable}', but this model reads text parts only.", param=path
            )


def _is_answer(item: InputItem) -> bool:
    return isinstance(item, MessageItem) and item.role == "assistant"
