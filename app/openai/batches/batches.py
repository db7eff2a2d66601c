"""The batches of /v1/batches as routes see them: created, read, listed, cancelled."""

from __future__ import annotations

import secrets
import sqlite3
import time
from typing import Any

import orjson
from fastapi import Request

from tessera.app.openai.batches.schema import BatchRequest
from tessera.app.openai.batches.tables import change_status, counters, insert_batch
from tessera.app.openai.files.files import Files
from tessera.app.openai.pages import PageRequest
from tessera.app.settings import AppSettings
from tessera.app.store.errors import StoreQuotaError
from tessera.app.store.objects import ObjectTable, StoredObject, StoreLimits
from tessera.app.store.store import Store
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError, RequestError

MAX_BATCHES = 10_000  # of one API key
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class ConflictError(RequestError):
    """The object is not in a state for this."""

    status = 409
    code = "conflict"


class Batches:
    """Every method may raise StoreUnavailableError or StoreFullError.

    Attributes:
        models: the names that this server serves, which batches are kept under.
    """

    def __init__(self, store: Store, files: Files, settings: AppSettings) -> None:
        self.store = store
        self.files = files
        self.settings = settings
        names = ((*model.served_model_names, *model.embedding_model_names) for model in settings.models)
        self.models = "\n".join(name for each in names for name in each)
        self.table = ObjectTable(
            "batch",
            StoreLimits.of(settings),
            max_count=MAX_BATCHES + 1,
            max_bytes=int(settings.key_data_limit * 2**30),
            evicts=False,
        )

    async def create(self, tenant: str, request: BatchRequest) -> dict[str, Any]:
        """-> the batch object. Raises NotFoundError or InvalidRequestError for its file."""
        file = await self.files.find(tenant, request.input_file_id, param="input_file_id")
        if file.label != "batch":
            raise InvalidRequestError(
                f"The file has the purpose {file.label!r}; a batch's input must have the purpose 'batch'.",
                param="input_file_id",
            )
        batch_id = f"batch_{secrets.token_hex(16)}"
        now = int(time.time())
        deadline = now + request.window_seconds
        body = {
            "endpoint": request.endpoint,
            "input_file_id": file.id,
            "completion_window": request.completion_window,
            "expires_at": deadline,
            "metadata": request.metadata,
            "output_lifetime": request.output_expires_after.seconds if request.output_expires_after else None,
        }
        await self.files.with_content(file, lambda contents: contents.link(file.id, batch_id), param="input_file_id")
        try:
            return await self.store.transact(
                lambda database: self._insert(database, tenant, batch_id, body, deadline, file.size)
            )
        except Exception:  # not where it is cancelled: the transaction goes on
            await self.store.with_contents(lambda contents: contents.remove(batch_id))
            raise

    async def find(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Raises NotFoundError."""
        return await self.store.query(lambda database: self._find(database, tenant, batch_id)[1])

    async def page(self, tenant: str, asked: PageRequest) -> tuple[list[dict[str, Any]], bool]:
        """Batch objects, and whether there are more. Raises InvalidRequestError."""

        def read(database: sqlite3.Connection) -> tuple[list[dict[str, Any]], bool] | None:
            page = self.table.page(database, tenant, limit=asked.limit, ascending=asked.ascending, after=asked.after)
            if page is None:
                return None
            return [batch_object(database, stored) for stored in page.objects], page.has_more

        found = await self.store.query(read)
        if found is None:
            raise InvalidRequestError(f"after: there is no batch {str(asked.after)[:100]!r}.", param="after")
        return found

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """-> the batch, which its owner ends soon. Raises NotFoundError or ConflictError."""

        def change(database: sqlite3.Connection) -> dict[str, Any]:
            stored, found = self._find(database, tenant, batch_id)
            if found["status"] in ("cancelling", "cancelled"):
                return found
            if found["status"] not in ("validating", "in_progress"):
                raise ConflictError(f"Cannot cancel a batch with status '{found['status']}'.")
            change_status(database, stored.seq, "cancelling", {"cancelling_at": int(time.time())})
            return self._find(database, tenant, batch_id)[1]

        return await self.store.transact(change)

    def check_results(self, database: sqlite3.Connection, tenant: str) -> None:
        """Raise StoreFullError where a tenant's batches have too many results beside its files, which they become.

        One line of a hundred bytes may have a result of megabytes, so that the input's size says nothing.
        """
        num_bytes = self.table.usage(database, tenant)[1] + self.files.num_bytes(database, tenant)
        limit = int(self.settings.key_data_limit * 2**30)
        if num_bytes > 2 * limit:
            raise StoreQuotaError(f"At most {limit} bytes of batches, and of files, are stored for each API key.")
        self.table.check_store(database)

    def _insert(
        self,
        database: sqlite3.Connection,
        tenant: str,
        batch_id: str,
        body: dict[str, Any],
        deadline: float,
        input_bytes: int,
    ) -> dict[str, Any]:
        insert_batch(
            database,
            self.table,
            tenant,
            batch_id,
            body,
            models=self.models,
            deadline=deadline,
            input_bytes=input_bytes,
            max_count=MAX_BATCHES,
        )
        return self._find(database, tenant, batch_id)[1]

    def _find(self, database: sqlite3.Connection, tenant: str, batch_id: str) -> tuple[StoredObject, dict[str, Any]]:
        stored = self.table.find(database, tenant, batch_id)
        if stored is None:
            raise NotFoundError(f"No batch found with id '{batch_id[:100]}'.", param="batch_id", code="batch_not_found")
        return stored, batch_object(database, stored)


def batch_object(database: sqlite3.Connection, stored: StoredObject) -> dict[str, Any]:
    body = orjson.loads(stored.body)
    status, counts = counters(database, stored.seq)
    return {
        "id": stored.id,
        "object": "batch",
        "endpoint": body["endpoint"],
        "model": body.get("model"),
        "errors": body.get("errors"),
        "input_file_id": body["input_file_id"],
        "completion_window": body["completion_window"],
        "status": status,
        "output_file_id": body.get("output_file_id"),
        "error_file_id": body.get("error_file_id"),
        "created_at": stored.created,
        "expires_at": body["expires_at"],
        **{f"{name}_at": body.get(f"{name}_at") for name in TIMES},
        "request_counts": {
            "total": body.get("total", 0),
            "completed": counts["completed"],
            "failed": counts["failed"],
        },
        "usage": {
            "input_tokens": counts["input_tokens"],
            "input_tokens_details": {"cached_tokens": counts["cached_tokens"]},
            "output_tokens": counts["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["reasoning_tokens"]},
            "total_tokens": counts["input_tokens"] + counts["output_tokens"],
        },
        "metadata": body.get("metadata"),
    }


def batches_of(request: Request) -> Batches:
    batches: Any = request.app.state.batches
    assert isinstance(batches, Batches)
    return batches
