"""The files of /v1/files: a row for each in the store, and its content beside the database."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, TypeVar

import orjson
from fastapi import Request

from tessera.app.openai.pages import PageRequest
from tessera.app.settings import AppSettings
from tessera.app.store.contents import Contents, IncomingContent
from tessera.app.store.objects import ObjectTable, StoredObject, StoreLimits
from tessera.app.store.store import Store
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

T = TypeVar("T")

UPLOAD_PURPOSES = ("batch", "fine-tune", "user_data")
OUTPUT_PURPOSES = ("batch_output", "fine-tune-results")
MAX_FILES = 10_000  # of one API key


class Files:
    """Every method may raise StoreUnavailableError or StoreFullError."""

    def __init__(self, store: Store, settings: AppSettings) -> None:
        self.store = store
        self.max_bytes = int(settings.max_file_size * 2**20)
        self._table = ObjectTable(
            "file",
            StoreLimits.of(settings),
            max_count=MAX_FILES,
            max_bytes=int(settings.key_data_limit * 2**30),
            evicts=False,
        )

    async def check_room(self, tenant: str, size: int) -> None:
        """Raise StoreFullError where no file of `size` bytes can be stored."""
        await self.store.transact(lambda database: self._table.make_room(database, tenant, size))

    def num_bytes(self, database: sqlite3.Connection, tenant: str) -> int:
        """Of a tenant's files."""
        return self._table.usage(database, tenant)[1]

    async def publish(
        self, tenant: str, incoming: IncomingContent, filename: str, purpose: str, lifetime: int | None
    ) -> dict[str, Any]:
        """Store what has been uploaded; -> the file object.

        Args:
            lifetime: seconds until it expires; None leaves that to the store.
        """
        file_id = new_file_id()
        await self.store.with_contents(lambda _: incoming.publish(file_id))
        try:
            stored = await self.store.transact(
                lambda database: self.insert(
                    database, tenant, file_id, filename, purpose, incoming.num_bytes, lifetime=lifetime
                )
            )
        except Exception:  # not where it is cancelled: the transaction goes on
            await self.store.with_contents(lambda contents: contents.remove(file_id))
            raise
        return file_object(stored)

    def insert(
        self,
        database: sqlite3.Connection,
        tenant: str,
        file_id: str,
        filename: str,
        purpose: str,
        num_bytes: int,
        *,
        lifetime: int | None = None,
        is_bounded: bool = True,
    ) -> StoredObject:
        """Make published content a file, in a transaction."""
        self._table.insert(
            database,
            tenant,
            file_id,
            orjson.dumps({"filename": filename, "bytes": num_bytes}),
            label=purpose,
            extra_bytes=num_bytes,
            has_content=True,
            lifetime=lifetime,
            is_bounded=is_bounded,
        )
        stored = self._table.find(database, tenant, file_id)
        assert stored is not None
        return stored

    async def find(self, tenant: str, file_id: str, *, param: str = "id") -> StoredObject:
        """Raises NotFoundError."""
        stored = await self.store.query(partial(self._table.find, tenant=tenant, object_id=file_id))
        if stored is None:
            raise _not_found(file_id, param)
        return stored

    async def with_content(self, stored: StoredObject, work: Callable[[Contents], T], *, param: str = "id") -> T:
        """The result of `work` on its content, run in a thread. Raises NotFoundError where it is deleted by now."""

        def find(contents: Contents) -> T:
            try:
                return work(contents)
            except FileNotFoundError:
                raise _not_found(stored.id, param) from None

        return await self.store.with_contents(find)

    async def open(self, stored: StoredObject) -> BinaryIO:
        """Its content, for the caller to close. Raises NotFoundError."""
        return await self.with_content(stored, lambda contents: contents.path(stored.id).open("rb"))

    async def page(self, tenant: str, asked: PageRequest, purpose: str | None) -> tuple[list[dict[str, Any]], bool]:
        """File objects, and whether there are more. Raises InvalidRequestError."""

        def read(database: sqlite3.Connection) -> tuple[list[dict[str, Any]], bool] | None:
            page = self._table.page(
                database, tenant, limit=asked.limit, ascending=asked.ascending, after=asked.after, label=purpose
            )
            return (list(map(file_object, page.objects)), page.has_more) if page is not None else None

        found = await self.store.query(read)
        if found is None:
            raise InvalidRequestError(f"after: there is no file {str(asked.after)[:100]!r}.", param="after")
        return found

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFoundError."""
        await self.find(tenant, file_id)
        await self.store.transact(partial(self._table.delete, tenant=tenant, object_id=file_id))
        await self.store.with_contents(lambda contents: contents.remove(file_id))


def _not_found(file_id: str, param: str = "id") -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id[:100]}", param=param, code="file_not_found")


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def file_object(stored: StoredObject) -> dict[str, Any]:
    body = orjson.loads(stored.body)
    return {
        "id": stored.id,
        "object": "file",
        "bytes": body["bytes"],
        "created_at": stored.created,
        "expires_at": int(stored.expires) if stored.expires is not None else None,
        "filename": body["filename"],
        "purpose": stored.label,
        "status": "processed",
        "status_details": None,
    }


def files_of(request: Request) -> Files:
    files: Any = request.app.state.files
    assert isinstance(files, Files)
    return files
