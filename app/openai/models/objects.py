"""Models of the model objects, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tessera.app.http.description import ApiObject


class ModelPermission(ApiObject):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class ModelObject(ApiObject):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = Field(description="Of an adapter: the model that it is for.")
    permission: list[ModelPermission]
    max_model_len: int | None = Field(description="The longest context in tokens; null while the model is loaded.")


class DeletedModel(ApiObject):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ModelList(ApiObject):
    object: Literal["list"]
    data: list[ModelObject]
