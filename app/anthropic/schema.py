"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StrictBool,
    Tag,
)

from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.schema.examples import HELLO, WEATHER_PARAMETERS
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_NAME,
    MAX_PARTS,
    MAX_STOP_LENGTH,
    JsonObject,
    Label,
    Off,
    Text,
    TextContent,
    TextPart,
    at_most,
    text_of,
    wrong,
)
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.request import RequestModel
from tessera.app.schema.structured_output import JsonSchema, JsonSchemaFormat
from tessera.app.schema.tools import MAX_TOOL_DESCRIPTION, MAX_TOOLS, Tool, ToolChoice, ToolName
from tessera.engine.contract.errors import InvalidRequestError

MAX_STOP_SEQUENCES = 64
TEXT_KEYS = {"text": "text"}


def _text(value: Any) -> str:
    return text_of(value, TEXT_KEYS)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value, TEXT_KEYS)


OptionalText = Annotated[str | None, PlainValidator(_text_or_none, json_schema_input_type=TextContent | None)]
ResultText = Annotated[
    str, PlainValidator(lambda value: _text_or_none(value) or "", json_schema_input_type=TextContent | None)
]


class Block(BaseModel):
    """Base of the content blocks. Marks for prompt caching are accepted: prefixes are cached without them."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ToolUseBlock(Block):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    input: JsonObject


class ToolResultBlock(Block):
    """The result of the call `tool_use_id`."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_NAME)
    content: ResultText = ""
    is_error: Off = False


class ThinkingBlock(Block):
    """Reasoning of an earlier turn; its signature is not needed."""

    type: Literal["thinking"]
    thinking: Text


def _block_type(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if type(kind) is str else None


ContentBlock = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")],
    Discriminator(_block_type),
]
Blocks = Annotated[list[ContentBlock], Field(max_length=MAX_PARTS)]


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if type(value) is str else value


class Message(BaseModel):
    """`content` is a string or a list of blocks."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks, BeforeValidator(_as_blocks, json_schema_input_type=Text | Blocks)]


def _custom_only(value: Any) -> Any:
    kind = value.get("type") if type(value) is dict else None
    if kind not in (None, "custom"):
        shown = kind[:40] if type(kind) is str else "unknown"
        raise wrong(f"has the type '{shown}', but only the client's own tools, type 'custom', are supported")
    return value


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


def _no_budget(value: Any) -> None:
    if value is not None:
        raise wrong("is not supported: how long the model thinks cannot be limited apart from max_tokens")


class Thinking(BaseModel):
    """For models whose chat template can turn reasoning on and off; a budget cannot be set."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[None, PlainValidator(_no_budget, json_schema_input_type=None)] = None


class MessageMetadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    user_id: Label | None = None


class MessageFormat(BaseModel):
    """JSON that matches `schema`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["json_schema"]
    definition: JsonObject = Field(alias="schema", description="A JSON schema, nested at most 64 levels deep.")


class OutputConfig(BaseModel):
    """Structured output; the effort cannot be set."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    format: MessageFormat | None = None
    effort: None = None


StopSequences = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOP_SEQUENCES)
]


class MessagesPrompt(RequestModel):
    """The fields that decide the prompt: the whole body of /v1/messages/count_tokens."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "speed": ("standard",),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL", "messages": HELLO}}

    model: str = Field(max_length=MAX_NAME)
    messages: Annotated[list[Message], at_most(MAX_MESSAGES)] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: OptionalText = None
    tools: list[Annotated[MessageTool, BeforeValidator(_custom_only)]] | None = Field(
        default=None, max_length=MAX_TOOLS
    )
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=64)

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise InvalidRequestError(
                "tool_choice.name is required where its type is 'tool'.", param="tool_choice.name"
            )
        for index, message in enumerate(self.messages):
            if not message.content and (message.role != "assistant" or index < len(self.messages) - 1):
                path = f"messages[{index}].content"
                raise InvalidRequestError(f"{path} must have at least one block.", param=path)
            for position, block in enumerate(message.content):
                path = f"messages[{index}].content[{position}]"
                allowed = "user" if isinstance(block, ToolResultBlock) else "assistant"
                if not isinstance(block, TextPart) and message.role != allowed:
                    raise InvalidRequestError(
                        f"{path}: '{block.type}' belongs in messages of role '{allowed}'.", param=path
                    )


class MessagesRequest(MessagesPrompt, SamplingFields):
    """A conversation, one completion of it. A final message of the assistant is continued."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **MessagesPrompt.refused,
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
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
    output_config: OutputConfig | None = None

    @property
    def response_format(self) -> JsonSchemaFormat | None:
        """`output_config.format` as Chat Completions has it."""
        output = self.output_config.format if self.output_config is not None else None
        if output is None:
            return None
        return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(name="answer", schema=output.definition))
