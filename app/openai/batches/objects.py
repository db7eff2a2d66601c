"""Response models of /v1/batches."""

from __future__ import annotations

from typing import Literal

from tessera.app.http.description import ApiObject


class BatchErrorObject(ApiObject):
    """Something wrong with the input file; `line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(ApiObject):
    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchCounts(ApiObject):
    total: int
    completed: int
    failed: int


class BatchInputDetails(ApiObject):
    cached_tokens: int


class BatchOutputDetails(ApiObject):
    reasoning_tokens: int


class BatchUsage(ApiObject):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class BatchObject(ApiObject):
    """A batch and how far it is."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(ApiObject):
    """Batches in the order of their creation."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
