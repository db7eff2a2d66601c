"""Models of the chat completion object and its chunks, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, RootModel

from tessera.app.http.description import ApiObject
from tessera.app.http.dialect import ErrorObject
from tessera.app.openai.objects import CompletionEnvelope, FinishReasonName, PromptLogprob, TokenLogprob, UsageObject

ChatFinishReasonName: TypeAlias = FinishReasonName | Literal["function_call"]


class CalledFunction(ApiObject):
    name: str
    arguments: str = Field(description="JSON text.")


class ToolCallObject(ApiObject):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustomTool(ApiObject):
    name: str
    input: str


class CustomCallObject(ApiObject):
    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AssistantMessage(ApiObject):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: str = Field(default="", description="Left out where there is none, as are the next two fields.")
    reasoning_content: str = Field(default="", description="The same under its other name.")
    tool_calls: list[Annotated[ToolCallObject | CustomCallObject, Field(discriminator="type")]] = Field(default=[])
    function_call: CalledFunction | None = Field(default=None, description="Only with functions.")


class ChatLogprobs(ApiObject):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ApiObject):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonName
    token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")


class ChatCompletionObject(CompletionEnvelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = Field(default=[], description="Only where asked for.")
    prompt_token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")


class CalledFunctionDelta(ApiObject):
    name: str = Field(default="", description="Only in the first delta of a call.")
    arguments: str = Field(description="A piece of JSON text.")


class CustomToolDelta(ApiObject):
    name: str = Field(default="", description="Only in the first delta of a call.")
    input: str = Field(description="A piece of the input.")


class ToolCallDelta(ApiObject):
    """The next piece of call number `index`."""

    index: int
    id: str = Field(default="", description="Only in the first delta of a call.")
    type: Literal["function", "custom"] = Field(default="function", description="Only in the first delta of a call.")
    function: CalledFunctionDelta | None = None
    custom: CustomToolDelta | None = None


class MessageDelta(ApiObject):
    """The additions of a chunk to the message; empty in the last chunk of a choice."""

    role: Literal["assistant"] = Field(default="assistant", description="Only in the first chunk.")
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = Field(default="", description="The same as reasoning.")
    tool_calls: list[ToolCallDelta] = Field(default=[])
    function_call: CalledFunctionDelta | None = Field(default=None, description="Only with functions.")


class ChatChunkChoice(ApiObject):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonName | None
    token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")


class ChatCompletionChunk(CompletionEnvelope):
    """The last one has no choices where `include_usage` asks for the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageObject | None = Field(default=None, description="Only with include_usage.")
    prompt_token_ids: list[int] = Field(default=[], description="Only in the first chunk, with return_token_ids.")


class ChatCompletionEvent(RootModel[Any]):
    """The data of an event: a chunk, or the error that ends the stream."""

    model_config = ConfigDict(defer_build=True)
    root: ChatCompletionChunk | ErrorObject


class StoredCompletionObject(ChatCompletionObject):
    """A chat completion with its metadata."""

    metadata: dict[str, str]


class StoredCompletionList(ApiObject):
    object: Literal["list"]
    data: list[StoredCompletionObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(ApiObject):
    """A message of the completion's request; fields that it came without are left out, but `content`."""

    id: str
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None
    name: str = ""
    tool_calls: list[dict[str, Any]] = Field(default=[])
    tool_call_id: str = ""
    refusal: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    function_call: CalledFunction | None = None


class StoredMessageList(ApiObject):
    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedCompletion(ApiObject):
    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]
