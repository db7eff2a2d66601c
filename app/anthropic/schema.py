"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from tessera.app.anthropic.blocks import ContentBlock, Effort, Message, unreadable
from tessera.app.anthropic.context import ContextManagement
from tessera.app.anthropic.errors import NO_THREADS
from tessera.app.anthropic.tools import AnyTool, MessageToolChoice, own_tools
from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.schema.examples import HELLO, WEATHER_PARAMETERS
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_NAME,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    Entries,
    JsonObject,
    Label,
    Off,
    TextContent,
    at_most,
    integer,
    text_of,
)
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.app.schema.structured_output import JsonSchema, JsonSchemaFormat
from tessera.app.schema.tools import MAX_TOOLS
from tessera.engine.contract.errors import InvalidRequestError

TEXT_KEYS = {"text": "text"}


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value, TEXT_KEYS)


OptionalText = Annotated[str | None, PlainValidator(_text_or_none, json_schema_input_type=TextContent | None)]


class Thinking(BaseModel):
    """Whether the model reasons first, where that can be switched, and for how many tokens at most.

    `between_tools`: only after results of tools.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = integer(0, MAX_INT32, "Most tokens of reasoning; it is ended there.")
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        default=None,
        description="omitted: blocks of reasoning have a signature only, with which the reasoning comes back;"
        " otherwise all of it is shown.",
    )


class MessageMetadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    user_id: Label | None = None


class MessageFormat(BaseModel):
    """JSON that matches `schema`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["json_schema"]
    definition: JsonObject = Field(alias="schema", description="A JSON schema, nested at most 64 levels deep.")


class OutputConfig(BaseModel):
    """Structured output, and the effort, for chat templates that know it as `reasoning_effort`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    format: MessageFormat | None = None
    effort: Effort | None = None


StopSequences = Annotated[
    Entries[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOPS)
]


class MessagesPrompt(RequestModel):
    """The fields that decide the prompt: the whole body of /v1/messages/count_tokens."""

    refused: ClassVar[FieldValues] = {
        "container": (),
        "mcp_servers": ([],),
    }
    hints: ClassVar[FieldValues] = {"inference_geo": (), "speed": ("standard",)}

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL", "messages": HELLO}}

    model: str = Field(max_length=MAX_NAME)
    messages: Annotated[Entries[Message], at_most(MAX_MESSAGES)] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: OptionalText = None
    tools: Annotated[
        Entries[AnyTool] | None,
        Field(max_length=MAX_TOOLS),
        BeforeValidator(own_tools),
    ] = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessageFormat | None = Field(default=None, description="The older name of `output_config.format`.")
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=64)

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason; None where the request does not say."""
        if self.thinking is None:
            return None
        if self.thinking.type == "between_tools":
            newest = next((message for message in reversed(self.messages) if message.role == "user"), None)
            return newest is not None and any(block.type == "tool_result" for block in newest.content)
        return self.thinking.type != "disabled"

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise InvalidRequestError(
                "tool_choice.name is required where its type is 'tool'.", param="tool_choice.name"
            )
        has_history = any(message.role == "assistant" for message in self.messages)
        for index, message in enumerate(self.messages):
            has_settings = message.role == "system" and message.output_config is not None
            if not message.content and message.role != "assistant" and not has_settings:
                path = f"messages[{index}].content"
                raise InvalidRequestError(f"{path} must have at least one block.", param=path)
            for position, block in enumerate(message.content):
                _check_block(block, message.role, f"messages[{index}].content[{position}]", has_history=has_history)


# Blocks that only one role may have; all others stand anywhere.
_ROLES = {"tool_use": "assistant", "tool_result": "user", "thinking": "assistant", "redacted_thinking": "assistant"}


def _check_block(block: ContentBlock, role: str, path: str, *, has_history: bool) -> None:
    """Refuse a block that belongs elsewhere, and at the beginning of a conversation one that cannot be read.

    Later on such a block stands in the history that a client sends again and again, and a refusal would end its
    session.
    """
    allowed = _ROLES.get(block.type, role)
    if role != allowed:
        raise InvalidRequestError(f"{path}: '{block.type}' belongs in messages of role '{allowed}'.", param=path)
    kind = unreadable(block)
    if kind is not None and not has_history:
        raise InvalidRequestError(f"{path} is of the type '{kind[:80]}', but this model reads text only.", param=path)


class MessagesRequest(MessagesPrompt, SamplingFields):
    """A conversation, one completion of it. A final message of the assistant is continued."""

    refused: ClassVar[FieldValues] = {
        **MessagesPrompt.refused,
        "compaction": (),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
        "thread": (),
    }
    hints: ClassVar[FieldValues] = {
        **MessagesPrompt.hints,
        "diagnostics": (),
        "fallbacks": ([],),
        "service_tier": ("auto", "standard_only"),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "max_tokens": 64, "messages": HELLO},
        "tools": {
            "model": "MODEL",
            "max_tokens": 64,
            "messages": HELLO,
            "tools": [{"name": "weather", "input_schema": WEATHER_PARAMETERS}],
        },
    }

    max_tokens: int = Field(ge=1, le=MAX_INT32, description="Most tokens to generate.")
    stop_sequences: StopSequences | None = None
    stream: Off = False
    metadata: MessageMetadata | None = None

    @classmethod
    def check_refused(cls, body: Mapping[str, Any]) -> None:
        if body.get("thread") is not None:  # the server would hold the conversation: without it a turn has no history
            raise InvalidRequestError(
                "thread is not supported by this server: send the whole conversation in messages.",
                param="thread",
                code=NO_THREADS,
            )
        super().check_refused(body)

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def response_format(self) -> JsonSchemaFormat | None:
        """`output_config.format` as Chat Completions has it."""
        output = self.output_config.format if self.output_config is not None else None
        output = output or self.output_format
        if output is None:
            return None
        return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(name="answer", schema=output.definition))
