"""Models of the model objects, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tessera.app.http.description import ApiObject


class ModelObject(ApiObject):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="The longest context in tokens; null while the model is loaded.")


class ModelList(ApiObject):
    object: Literal["list"]
    data: list[ModelObject]
