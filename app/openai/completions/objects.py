"""Models of the text completion object and its chunks, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, RootModel

from tessera.app.http.description import ApiObject
from tessera.app.http.dialect import ErrorObject
from tessera.app.openai.objects import CompletionEnvelope, FinishReasonName, PromptLogprob, UsageObject


class CompletionLogprobs(ApiObject):
    """Parallel lists with an entry per token; the first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ApiObject):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = Field(default=[], description="Only where asked for.")
    prompt_token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")
    token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")


class TextCompletionObject(CompletionEnvelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageObject


class CompletionChunkChoice(ApiObject):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    prompt_token_ids: list[int] = Field(default=[], description="Only in a choice's first chunk.")
    token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")


class TextCompletionChunk(CompletionEnvelope):
    """The last one has no choices where `include_usage` asks for the usage."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageObject | None = Field(default=None, description="Only with include_usage.")


class TextCompletionEvent(RootModel[Any]):
    """The data of an event: a chunk, or the error that ends the stream."""

    model_config = ConfigDict(defer_build=True)
    root: TextCompletionChunk | ErrorObject
