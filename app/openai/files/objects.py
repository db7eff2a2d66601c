"""Response models of /v1/files."""

from __future__ import annotations

from typing import Literal

from tessera.app.http.description import ApiObject


class FileObject(ApiObject):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output", "fine-tune", "fine-tune-results", "user_data"]
    status: Literal["processed"]
    status_details: None


class FileList(ApiObject):
    """Files in the order of their creation."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(ApiObject):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]
