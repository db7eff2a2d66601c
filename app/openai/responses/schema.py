"""The body of POST /v1/responses: input items, function tools, the text's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, StrictBool, Tag

from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.schema.examples import WEATHER_FUNCTION
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_NAME,
    MAX_PARTS,
    Label,
    Metadata,
    NotSupported,
    Off,
    Text,
    at_most,
    integer,
    text_of,
    wrong,
)
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.structured_output import JsonSchema, JsonSchemaFormat, PlainFormat
from tessera.app.schema.tools import MAX_TOOLS, Tool, ToolChoice, ToolFunction, ToolName
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import MAX_LOGPROBS

LOGPROBS_INCLUDED = "message.output_text.logprobs"

TEXT_KEYS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}


class InputText(BaseModel):
    """A part with text; images, files and audio are refused and nothing is fetched."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


ItemText = Text | Annotated[list[InputText], Field(max_length=MAX_PARTS)]


def _text(value: Any) -> str:
    return text_of(value, TEXT_KEYS)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value, TEXT_KEYS)


PartsText = Annotated[str, PlainValidator(_text, json_schema_input_type=ItemText)]
OptionalText = Annotated[str | None, PlainValidator(_text_or_none, json_schema_input_type=ItemText | None)]


class Item(BaseModel):
    """Base of the input items. Their ids and states, which outputs have too, are accepted and not needed."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class MessageItem(Item):
    """A message; `type` may be omitted."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: PartsText


class FunctionCallItem(Item):
    """A call that the model made earlier; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    arguments: Text = ""


class FunctionCallOutputItem(Item):
    """The result of the call `call_id`."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_NAME)
    output: PartsText


class ReasoningItem(Item):
    """Reasoning that preceded the next item."""

    type: Literal["reasoning"]
    content: OptionalText = None
    summary: OptionalText = None
    encrypted_content: None = Field(default=None, description="Must be null: reasoning is given in `content`.")


def _item_type(item: Any) -> str | None:
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type", "message")
    return kind if type(kind) is str else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES)]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if type(value) is str else value


def _function_only(value: Any) -> Any:
    kind = value.get("type") if type(value) is dict else "function"
    if kind != "function":
        shown = kind[:40] if type(kind) is str else "unknown"
        raise wrong(f"has the type '{shown}', but only tools of type 'function' are supported")
    return value


class FunctionTool(ToolFunction):
    """A function of the client's; `parameters` is a JSON Schema of its arguments."""

    type: Literal["function"]

    def for_chat(self) -> Tool:
        """The tool as Chat Completions has it."""
        return Tool.model_validate(
            {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}
        )


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["function"]
    name: ToolName


class FlatSchemaFormat(JsonSchema):
    """JSON that matches `schema`, with the name and the schema at one level."""

    type: Literal["json_schema"]


class TextConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_obfuscation: NotSupported = None


class ReasoningConfig(BaseModel):
    """Accepted without effect: the amount of reasoning cannot be set."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    effort: None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(SamplingFields):
    """A conversation as items, one response to it. `previous_response_id` continues a stored one."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "enable_response_messages": (False,),
        "image": (),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "n": (1,),
        "previous_input_messages": ([],),
        "prompt": (),
        "prompt_logprobs": (),
        "request_id": (),
        "prompt_cache_options": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "input": "Hello!", "instructions": "Be brief."},
        "next turn": {"model": "MODEL", "input": "And then?", "previous_response_id": "resp_0123"},
        "tools": {"model": "MODEL", "input": "Hello!", "tools": [{"type": "function", **WEATHER_FUNCTION}]},
    }

    model: str = Field(max_length=MAX_NAME)
    input: Annotated[InputItems, BeforeValidator(_as_items, json_schema_input_type=Text | InputItems)]
    instructions: Text | None = Field(default=None, description="A system message before the input.")
    previous_response_id: str | None = Field(default=None, max_length=MAX_NAME)
    store: StrictBool | None = Field(default=None, description="Whether the response is stored; true if omitted.")
    stream: Off = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = integer(
        1, MAX_INT32, "Most tokens to generate; the rest of the context if omitted."
    )
    max_tool_calls: int | None = integer(1, MAX_INT32, "Limits built-in tools, of which there are none.")
    tools: list[Annotated[FunctionTool, BeforeValidator(_function_only)]] | None = Field(
        default=None, max_length=MAX_TOOLS
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: the oldest items are dropped if the context is too short for all."
    )
    top_logprobs: int | None = integer(0, MAX_LOGPROBS, "Alternatives to report per token.")
    include: list[Included] | None = Field(default=None, max_length=64)
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=64)
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS_INCLUDED in (self.include or ())

    @property
    def wants_storing(self) -> bool:
        return self.store is not False

    @property
    def chat_tool_choice(self) -> ToolChoice | None:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice(mode="function", name=self.tool_choice.name)
        return ToolChoice(mode=self.tool_choice) if self.tool_choice is not None else None

    @property
    def response_format(self) -> PlainFormat | JsonSchemaFormat | None:
        """`text.format` as Chat Completions has it."""
        text_format = self.text.format if self.text is not None else None
        if isinstance(text_format, FlatSchemaFormat):
            return JsonSchemaFormat(type="json_schema", json_schema=text_format)
        return text_format

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true.", param="stream_options")
