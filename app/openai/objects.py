"""Models of the objects that several of OpenAI's endpoints return, for /openapi.json."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tessera.app.http.description import ApiObject

FinishReasonName: TypeAlias = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(ApiObject):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(ApiObject):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageObject(ApiObject):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionEnvelope(ApiObject):
    """The fields that chat and text completions and their chunks have in common."""

    id: str
    created: int
    model: str
    service_tier: None
    system_fingerprint: str


class AlternativeToken(ApiObject):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class PromptLogprob(ApiObject):
    """A token that is in the prompt, or might have been; the most probable has rank 1."""

    logprob: float
    rank: int
    decoded_token: str
