"""Models of the chat completion object and its chunks, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, RootModel

from tessera.app.http.description import ApiObject
from tessera.app.http.dialect import ErrorObject
from tessera.app.openai.objects import CompletionEnvelope, FinishReasonName, PromptLogprob, TokenLogprob, UsageObject


class CalledFunction(ApiObject):
    name: str
    arguments: str = Field(description="JSON text.")


class ToolCallObject(ApiObject):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ApiObject):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: str = Field(default="", description="Left out where there is none, as are the next two fields.")
    reasoning_content: str = Field(default="", description="The same under its other name.")
    tool_calls: list[ToolCallObject] = Field(default=[])


class ChatLogprobs(ApiObject):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ApiObject):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
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


class ToolCallDelta(ApiObject):
    """The next piece of call number `index`."""

    index: int
    id: str = Field(default="", description="Only in the first delta of a call.")
    type: Literal["function"] = Field(default="function", description="Only in the first delta of a call.")
    function: CalledFunctionDelta


class MessageDelta(ApiObject):
    """The additions of a chunk to the message; empty in the last chunk of a choice."""

    role: Literal["assistant"] = Field(default="assistant", description="Only in the first chunk.")
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = Field(default="", description="The same as reasoning.")
    tool_calls: list[ToolCallDelta] = Field(default=[])


class ChatChunkChoice(ApiObject):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    prompt_token_ids: list[int] = Field(default=[], description="Only in the first chunk, with return_token_ids.")
    token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")


class ChatCompletionChunk(CompletionEnvelope):
    """The last one has no choices where `include_usage` asks for the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageObject | None = Field(default=None, description="Only with include_usage.")


class ChatCompletionEvent(RootModel[Any]):
    """The data of an event: a chunk, or the error that ends the stream."""

    model_config = ConfigDict(defer_build=True)
    root: ChatCompletionChunk | ErrorObject
