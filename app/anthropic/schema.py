"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, StrictBool, Tag

from tessera.app.anthropic.blocks import ContentBlock, Message, unreadable
from tessera.app.anthropic.client_tools import CLIENT_TOOLS, TOOLSET, ClientTool
from tessera.app.anthropic.context import ContextManagement
from tessera.app.anthropic.errors import NO_THREADS
from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.schema.examples import HELLO, WEATHER_PARAMETERS
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_NAME,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    JsonObject,
    Label,
    Off,
    TextContent,
    at_most,
    integer,
    text_of,
    wrong,
)
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.request import FieldValues, RequestModel, log_once
from tessera.app.schema.structured_output import JsonSchema, JsonSchemaFormat
from tessera.app.schema.tool_names import MAX_TOOL_DESCRIPTION, ToolName
from tessera.app.schema.tools import MAX_TOOLS, Tool, ToolChoice
from tessera.engine.contract.errors import InvalidRequestError

TEXT_KEYS = {"text": "text"}


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value, TEXT_KEYS)


OptionalText = Annotated[str | None, PlainValidator(_text_or_none, json_schema_input_type=TextContent | None)]


# Tools that a service runs for the model, by the beginnings of their types: `web_search_20250305`.
_HOSTED_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")


def _own_tools(value: Any) -> Any:
    """The client's own tools. Those that a service would run are left out, because there is none here."""
    if type(value) is not list:
        return value
    own = []
    for tool in value:
        kind = tool.get("type") if type(tool) is dict else None
        if type(kind) is str and kind.startswith(_HOSTED_TOOLS):
            log_once(
                f"tool {kind}", "tools of the type %s are not shown to the model: nothing here runs them", kind[:80]
            )
        else:
            own.append(tool)
    return own


class MessageTool(BaseModel):
    """A function of the client's; `input_schema` is a JSON Schema of its input."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = Field(default=None, max_length=MAX_TOOL_DESCRIPTION)
    input_schema: JsonObject
    strict: StrictBool | None = None

    def for_chat(self) -> Tool:
        """The tool as Chat Completions has it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        strict = {"strict": self.strict} if self.strict is not None else {}
        return Tool.model_validate({"type": "function", "function": {**function, **strict}})


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if type(kind) is not str or not kind.startswith(CLIENT_TOOLS) or kind.startswith(TOOLSET):
        return "custom"
    return "client"


def _known(value: Any) -> Any:
    kind = value.get("type") if type(value) is dict else None
    if kind not in (None, "custom") and _tool_kind(value) != "client":
        shown = kind[:40] if type(kind) is str else "unknown"
        known = ", ".join(f"{name}*" for name in CLIENT_TOOLS)
        raise wrong(f"has the type '{shown}', but only the client's own tools are supported: custom, {known}")
    return value


AnyTool = Annotated[
    Annotated[Annotated[MessageTool, Tag("custom")] | Annotated[ClientTool, Tag("client")], Discriminator(_tool_kind)],
    BeforeValidator(_known),
]


class MessageToolChoice(BaseModel):
    """`any`: one of the tools must be used; `tool`: the one called `name`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: Off = False

    def for_chat(self) -> ToolChoice:
        if self.type == "tool":
            return ToolChoice(mode="function", name=self.name)
        return ToolChoice(mode="required" if self.type == "any" else self.type)


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
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


StopSequences = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOPS)
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
    messages: Annotated[list[Message], at_most(MAX_MESSAGES)] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: OptionalText = None
    tools: Annotated[
        list[AnyTool] | None,
        Field(max_length=MAX_TOOLS),
        BeforeValidator(_own_tools),
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
            if not message.content and message.role != "assistant":
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
