"""The shape of every answer, for the API's description at /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageAnswer(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="JSON text.")]


class ToolCallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]


class AlternativeToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: NotRequired[list[int]]


class AnswerFields(TypedDict):
    id: str
    created: int
    model: str
    service_tier: None
    system_fingerprint: str


class PromptLogprob(TypedDict):
    """Of a token that is, or might have been, in the prompt; the most probable has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


class ChatCompletion(AnswerFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class TextCompletion(AnswerFields):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: Literal["completed", "incomplete"]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(TypedDict):
    """With the request's own settings beside what is listed here."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputCall | OutputReasoning]
    usage: ResponseUsage
    model: str
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"]


class ListedItem(TypedDict):
    """With what its type has besides."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: Literal["completed"]


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class TextBlockAnswer(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlockAnswer(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockAnswer | ThinkingBlockAnswer | ToolUseAnswer]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, Field(description="Base64 of little-endian float32.")]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class TokenList(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str


class Health(TypedDict):
    status: Literal["ok", "unavailable"]
    reason: str


class Readiness(TypedDict):
    status: Literal["ready", "not ready"]


class Version(TypedDict):
    version: str


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorFields


class MessageErrorFields(TypedDict):
    type: str
    message: str


class MessageErrorAnswer(TypedDict):
    type: Literal["error"]
    error: MessageErrorFields
