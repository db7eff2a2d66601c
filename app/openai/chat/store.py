"""Stored chat completions. Every method but `store_completion` may raise StoreUnavailableError or StoreFullError."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request

from tessera.app.http.json_pieces import json_in_pieces
from tessera.app.openai.pages import PageRequest, list_object, unknown_after
from tessera.app.settings import AppSettings
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.objects import ObjectTable, StoredObject, StoreLimits
from tessera.app.store.store import Store
from tessera.engine.contract.errors import NotFoundError

logger = logging.getLogger("tessera.app")

T = TypeVar("T")


class CompletionStore:
    """At most `max_stored_objects` completions and `max_stored_bytes` per tenant; beyond, the oldest ones go."""

    def __init__(self, store: Store, settings: AppSettings) -> None:
        self._store = store
        self._table = ObjectTable(
            "chat.completion",
            StoreLimits.of(settings),
            max_count=settings.max_stored_objects,
            max_bytes=settings.max_stored_bytes,
            evicts=True,
        )

    async def store_completion(self, tenant: str, completion: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Store a completion and its request's messages; one that cannot be stored is given out all the same."""

        def change(database: sqlite3.Connection) -> None:
            body = json_in_pieces({"completion": completion, "messages": messages})
            self._table.insert(database, tenant, completion["id"], body, label=completion["model"])

        try:
            await self._store.transact(change)
        except (StoreUnavailableError, StoreFullError) as error:
            logger.warning("a chat completion is not stored: %s", error.message)

    async def find(self, tenant: str, completion_id: str) -> dict[str, Any]:
        """The completion. Raises NotFoundError."""
        return await self._found(tenant, completion_id, _completion_of)

    async def messages(self, tenant: str, completion_id: str) -> list[dict[str, Any]]:
        """The messages of the completion's request. Raises NotFoundError."""

        def messages_of(stored: StoredObject) -> list[dict[str, Any]]:
            messages: list[dict[str, Any]] = orjson.loads(stored.body)["messages"]
            return messages

        return await self._found(tenant, completion_id, messages_of)

    async def replace_metadata(self, tenant: str, completion_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        """-> the completion. Raises NotFoundError."""

        def change(database: sqlite3.Connection) -> dict[str, Any]:
            found = self._table.find(database, tenant, completion_id)
            if found is None:
                raise _not_found(completion_id)
            fields = orjson.loads(found.body)
            completion: dict[str, Any] = {**fields["completion"], "metadata": metadata}
            body = json_in_pieces({**fields, "completion": completion})
            self._table.replace_body(database, tenant, completion_id, body)
            return completion

        return await self._store.transact(change)

    async def delete(self, tenant: str, completion_id: str) -> None:
        """Raises NotFoundError."""
        if not await self._store.transact(lambda database: self._table.delete(database, tenant, completion_id)):
            raise _not_found(completion_id)

    async def page(
        self, tenant: str, page: PageRequest, model: str | None, metadata: Mapping[str, str]
    ) -> dict[str, Any]:
        """Completions of `model`, or of any, that have all of `metadata`. Raises InvalidRequestError."""

        def accepts(stored: StoredObject) -> bool:
            known: dict[str, str] = _completion_of(stored)["metadata"]
            return metadata.items() <= known.items()

        def query(database: sqlite3.Connection) -> dict[str, Any]:
            found = self._table.page(
                database,
                tenant,
                limit=page.limit,
                ascending=page.ascending,
                after=page.after,
                label=model,
                accepts=accepts if metadata else None,
            )
            if found is None:
                raise unknown_after("stored chat completions")
            return list_object([_completion_of(stored) for stored in found.objects], has_more=found.has_more)

        return await self._store.query(query)

    async def _found(self, tenant: str, completion_id: str, read: Callable[[StoredObject], T]) -> T:
        """Read a completion, which may be large, in the store's thread."""

        def query(database: sqlite3.Connection) -> T:
            found = self._table.find(database, tenant, completion_id)
            if found is None:
                raise _not_found(completion_id)
            return read(found)

        return await self._store.query(query)


def completions_of(request: Request) -> CompletionStore:
    completions: Any = request.app.state.stored_completions
    assert isinstance(completions, CompletionStore)
    return completions


def _completion_of(stored: StoredObject) -> dict[str, Any]:
    completion: dict[str, Any] = orjson.loads(stored.body)["completion"]
    return completion


def _not_found(completion_id: str) -> NotFoundError:
    return NotFoundError(f"There is no stored chat completion {completion_id[:100]!r} here.", code="not_found")
