"""Models of the response object, its items and events, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, RootModel

from tessera.app.http.description import ApiObject
from tessera.app.openai.conversations.objects import ItemStatusName, OutputText, ReasoningText
from tessera.app.openai.objects import TokenLogprob


class OutputMessage(ApiObject):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatusName
    content: list[OutputText]


class OutputCall(ApiObject):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str = Field(default="", description="Only of tools in a namespace.")
    arguments: str = Field(description="JSON text.")
    status: ItemStatusName


class OutputCustomCall(ApiObject):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str = Field(default="", description="Only of tools in a namespace.")
    input: str
    status: ItemStatusName


class OutputReasoning(ApiObject):
    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str = Field(default="", description="Only where `include` asks for it.")
    status: ItemStatusName


OutputItem: TypeAlias = Annotated[
    OutputMessage | OutputCall | OutputCustomCall | OutputReasoning, Field(discriminator="type")
]


class InputTokensDetails(ApiObject):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ApiObject):
    reasoning_tokens: int


class ResponseUsage(ApiObject):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ApiObject):
    reason: Literal["max_output_tokens"]


class ResponseError(ApiObject):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class PlainTextFormat(ApiObject):
    type: Literal["text"]


class ObjectTextFormat(ApiObject):
    type: Literal["json_object"]
    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class SchemaTextFormat(ApiObject):
    type: Literal["json_schema"]
    name: str
    definition: dict[str, Any] = Field(alias="schema")
    description: str | None
    strict: bool | None


class ResponseText(ApiObject):
    format: Annotated[PlainTextFormat | ObjectTextFormat | SchemaTextFormat, Field(discriminator="type")]
    verbosity: Literal["low", "medium", "high"]


class ResponseReasoning(ApiObject):
    effort: str | None
    summary: None


class ResponseConversation(ApiObject):
    """The conversation that the response was added to."""

    id: str


class ResponseFunction(ApiObject):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseCustomTool(ApiObject):
    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, Any] | None


class ResponseNamespace(ApiObject):
    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[Annotated[ResponseFunction | ResponseCustomTool, Field(discriminator="type")]]


class ResponseHostedTool(ApiObject):
    """A tool that was left out."""

    type: str


class ResponseObject(ApiObject):
    """A response in any state; without streaming it is completed or incomplete."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    conversation: ResponseConversation | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any]
    tools: list[ResponseFunction | ResponseCustomTool | ResponseNamespace | ResponseHostedTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class InputTokenCount(ApiObject):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(ApiObject):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class NumberedEvent(ApiObject):
    sequence_number: int


class ResponseStateEvent(NumberedEvent):
    """The first two events of a response and its last."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
    ]
    response: ResponseObject


class OutputItemEvent(NumberedEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(NumberedEvent):
    """An event within the item `item_id`, which is number `output_index`."""

    output_index: int
    item_id: str


class ContentPartEvent(ItemEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class OutputTextDelta(ItemEvent):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(ItemEvent):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(ItemEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningTextDone(ItemEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class CallArgumentsDelta(ItemEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class CallArgumentsDone(ItemEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(ItemEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(ItemEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseEvent(RootModel[Any]):
    """The data of an event."""

    model_config = ConfigDict(defer_build=True)
    root: Annotated[
        ResponseStateEvent
        | OutputItemEvent
        | ContentPartEvent
        | OutputTextDelta
        | OutputTextDone
        | ReasoningTextDelta
        | ReasoningTextDone
        | CallArgumentsDelta
        | CallArgumentsDone
        | CustomInputDelta
        | CustomInputDone,
        Field(discriminator="type"),
    ]
