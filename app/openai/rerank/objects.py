"""Models of what /v1/rerank, /v1/score and /v1/classify return, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tessera.app.http.description import ApiObject


class ScoringUsage(ApiObject):
    prompt_tokens: int
    total_tokens: int


class RerankedDocument(ApiObject):
    text: str


class RerankResult(ApiObject):
    index: int = Field(description="Of the document in the request.")
    relevance_score: float
    document: RerankedDocument | None = Field(
        default=None, description="Left out where return_documents is false.", exclude_if=lambda value: value is None
    )


class RerankList(ApiObject):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: ScoringUsage


class ScoreObject(ApiObject):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(ApiObject):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: ScoringUsage


class ClassificationObject(ApiObject):
    index: int
    label: str = Field(description="Of the class with the highest score.")
    probs: list[float] = Field(description="The score of each class.")
    num_classes: int


class ClassificationList(ApiObject):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassificationObject]
    usage: ScoringUsage
