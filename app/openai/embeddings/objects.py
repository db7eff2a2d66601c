"""Models of the embedding objects, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessera.app.http.description import ApiObject


class EmbeddingObject(ApiObject):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, Field(description="Base64 of little-endian float32.")]


class EmbeddingUsage(ApiObject):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ApiObject):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
