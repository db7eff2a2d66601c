"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StrictBool

from tessera.app.openai.conversations.configuration import FlatSchemaFormat, ReasoningConfig, TextConfig
from tessera.app.openai.conversations.items import InputItems, check_readable
from tessera.app.openai.conversations.tools import ResponseTool, ToolChoiceField
from tessera.app.schema.chat import ReasoningEffort
from tessera.app.schema.examples import WEATHER_FUNCTION
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_NAME,
    Entries,
    Label,
    Metadata,
    ModelName,
    NotSupported,
    Off,
    Text,
    integer,
    wrong,
)
from tessera.app.schema.generation_fields import SamplingFields
from tessera.app.schema.request import FieldValues
from tessera.app.schema.structured_output import AnyFormat, JsonSchemaFormat
from tessera.app.schema.tools import MAX_TOOLS, ToolChoice
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import MAX_LOGPROBS

LOGPROBS_INCLUDED = "message.output_text.logprobs"
SEALED_INCLUDED = "reasoning.encrypted_content"


def _as_items(value: Any) -> Any:
    if type(value) not in (str, list):
        raise wrong("must be a string or a list of items")
    return [{"role": "user", "content": value}] if type(value) is str else value


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_obfuscation: NotSupported = None


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


class ConversationName(BaseModel):
    """A conversation by its id."""

    id: str = Field(max_length=MAX_NAME)


def _conversation_id(value: Any) -> str | None:
    found = value.get("id") if type(value) is dict else value
    if value is not None and (type(found) is not str or len(found) > MAX_NAME):
        raise wrong('must be the id of a conversation, or {"id": ...}')
    return found


ConversationId = Annotated[
    str | None,
    PlainValidator(
        _conversation_id, json_schema_input_type=Annotated[str, Field(max_length=MAX_NAME)] | ConversationName | None
    ),
]


class ResponsesRequest(SamplingFields):
    """A conversation as items, one response to it. `previous_response_id` continues a stored one."""

    refused: ClassVar[FieldValues] = {
        "enable_response_messages": (False,),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "n": (1,),
        "previous_input_messages": ([],),
        "prompt": (),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
        "vllm_xargs": ({},),
    }
    hints: ClassVar[FieldValues] = {
        "access_programs": (),
        "background_options": ({"completion_window": "soonest"},),
        "context_management": ([],),
        "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
        "kv_transfer_params": ({},),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "prompt_cache_options": (),
        "request_id": (),
        "service_tier": ("auto", "default"),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "input": "Hello!", "instructions": "Be brief."},
        "next turn": {"model": "MODEL", "input": "And then?", "previous_response_id": "resp_0123"},
        "tools": {"model": "MODEL", "input": "Hello!", "tools": [{"type": "function", **WEATHER_FUNCTION}]},
    }

    model: ModelName = ""
    input: Annotated[InputItems, BeforeValidator(_as_items, json_schema_input_type=Text | InputItems)]
    instructions: Text | None = Field(default=None, description="A system message before the input.")
    previous_response_id: str | None = Field(default=None, max_length=MAX_NAME)
    conversation: ConversationId = Field(
        default=None, description="The id of a stored conversation, which the response continues and is added to."
    )
    store: StrictBool | None = Field(default=None, description="Whether the response is stored; true if omitted.")
    background: Off = Field(default=False, description="Go on without the client; the response is polled.")
    stream: Off = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = integer(
        1, MAX_INT32, "Most tokens to generate; the rest of the context if omitted."
    )
    max_tool_calls: int | None = integer(1, MAX_INT32, "Limits built-in tools, of which there are none.")
    tools: Entries[ResponseTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: StrictBool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: the oldest items are dropped if the context is too short for all."
    )
    top_logprobs: int | None = integer(0, MAX_LOGPROBS, "Alternatives to report per token.")
    include: Entries[Included] | None = Field(default=None, max_length=64)
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
    def wants_sealed_reasoning(self) -> bool:
        return SEALED_INCLUDED in (self.include or ())

    @property
    def chat_tool_choice(self) -> ToolChoice | None:
        return self.tool_choice.choice if self.tool_choice is not None else None

    @property
    def reasoning_effort(self) -> ReasoningEffort | None:
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def response_format(self) -> AnyFormat | None:
        """`text.format` as Chat Completions has it."""
        text_format = self.text.format if self.text is not None else None
        if isinstance(text_format, FlatSchemaFormat):
            return JsonSchemaFormat(type="json_schema", json_schema=text_format)
        return text_format

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.background and self.store is False:
            raise InvalidRequestError("background is only allowed where the response is stored.", param="background")
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequestError(
                "conversation and previous_response_id cannot both be given.", param="previous_response_id"
            )
        check_readable(self.input)
