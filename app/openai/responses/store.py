"""Stored responses, for `previous_response_id`, `item_reference` and retrieval."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import TypeAdapter

from tessera.app.http.json_pieces import json_in_pieces
from tessera.app.schema.chat import ChatMessage
from tessera.app.settings import AppSettings
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.objects import ObjectTable, StoreLimits
from tessera.app.store.schema import Schema
from tessera.app.store.store import Store

logger = logging.getLogger("tessera.app")

T = TypeVar("T")

MESSAGE: TypeAdapter[ChatMessage] = TypeAdapter(ChatMessage)

# Output items, which `item_reference` names; responses in the background and their events.
RESPONSES = Schema(
    "responses",
    (
        (
            """CREATE TABLE response_items (
                tenant TEXT NOT NULL, id TEXT NOT NULL, seq INTEGER NOT NULL REFERENCES objects (seq) ON DELETE CASCADE,
                PRIMARY KEY (tenant, id)
            ) WITHOUT ROWID""",
            "CREATE INDEX response_items_by_response ON response_items (seq)",
            """CREATE TABLE response_jobs (
                seq INTEGER PRIMARY KEY REFERENCES objects (seq) ON DELETE CASCADE, owner INTEGER NOT NULL,
                cancelled INTEGER NOT NULL DEFAULT 0, ended INTEGER NOT NULL DEFAULT 0
            )""",
            """CREATE TABLE response_events (
                seq INTEGER NOT NULL REFERENCES objects (seq) ON DELETE CASCADE, first INTEGER NOT NULL,
                data BLOB NOT NULL, PRIMARY KEY (seq, first)
            )""",
        ),
    ),
)
FIND_BY_ITEM = """
    SELECT objects.body FROM response_items JOIN objects USING (seq)
    WHERE response_items.tenant = ? AND response_items.id = ?"""


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """A response, its input items, and the conversation up to and including it, without instructions."""

    response: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    input_items: tuple[dict[str, Any], ...] = ()

    def encoded(self) -> bytes:
        """Messages that several responses share are stored, and counted, for each."""
        messages = [orjson.Fragment(MESSAGE.dump_json(message, exclude_none=True)) for message in self.messages]
        items = list(self.input_items)
        return json_in_pieces({"response": self.response, "messages": messages, "input_items": items})

    @classmethod
    def decoded(cls, body: bytes) -> StoredResponse:
        fields = orjson.loads(body)
        messages = tuple(map(MESSAGE.validate_python, fields["messages"]))
        return cls(fields["response"], messages, tuple(fields["input_items"]))


class ResponseStore:
    """At most `max_stored_objects` responses and `max_stored_bytes` per tenant; the least recently used ones go first.

    Every method but `store_response` may raise StoreUnavailableError or StoreFullError.
    """

    def __init__(self, store: Store, settings: AppSettings) -> None:
        self.store = store
        self.table = ObjectTable(
            "response",
            StoreLimits.of(settings),
            max_count=settings.max_stored_objects,
            max_bytes=settings.max_stored_bytes,
            evicts=True,
        )
        self.keeps_anything = settings.max_stored_objects > 0

    async def store_response(self, tenant: str, stored: StoredResponse) -> None:
        """Store a finished response; one that cannot be stored is given out all the same."""

        def change(database: sqlite3.Connection) -> None:
            seq = self.table.insert(database, tenant, stored.response["id"], stored.encoded())
            insert_items(database, tenant, seq, stored)

        try:
            await self.store.transact(change)
        except (StoreUnavailableError, StoreFullError) as error:
            logger.warning("a response is not stored: %s", error.message)

    async def find_response(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """A stored response without the conversation behind it."""

        def response_of(body: bytes) -> dict[str, Any]:
            response: dict[str, Any] = orjson.loads(body)["response"]
            return response

        return await self._find(tenant, response_id, response_of)

    async def find(self, tenant: str, response_id: str, *, uses: bool = False) -> StoredResponse | None:
        """A stored response; `uses` lets it be evicted after those that were used before."""
        found = await self._find(tenant, response_id, StoredResponse.decoded)
        if found is not None and uses:
            try:
                await self.store.transact(lambda database: self.table.mark_used(database, tenant, response_id))
            except (StoreUnavailableError, StoreFullError):
                logger.warning("a response cannot be marked as used")
        return found

    async def find_item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """An output item of a stored response, or None."""

        def query(database: sqlite3.Connection) -> dict[str, Any] | None:
            row = database.execute(FIND_BY_ITEM, (tenant, item_id)).fetchone()
            if row is None:
                return None
            output: list[dict[str, Any]] = orjson.loads(row[0])["response"]["output"]
            return next(item for item in output if item["id"] == item_id)

        return await self.store.query(query)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """-> whether there was one."""
        return await self.store.transact(lambda database: self.table.delete(database, tenant, response_id))

    async def _find(self, tenant: str, response_id: str, read: Callable[[bytes], T]) -> T | None:
        """Read a body, which may be large, in the store's thread."""

        def query(database: sqlite3.Connection) -> T | None:
            found = self.table.find(database, tenant, response_id)
            return read(found.body) if found is not None else None

        return await self.store.query(query)


def responses_of(request: Request) -> ResponseStore:
    responses: Any = request.app.state.responses
    assert isinstance(responses, ResponseStore)
    return responses


def insert_items(database: sqlite3.Connection, tenant: str, seq: int, stored: StoredResponse) -> None:
    """Let the output items of a response be found by their ids."""
    rows = [(tenant, item["id"], seq) for item in stored.response["output"]]
    database.executemany("INSERT OR REPLACE INTO response_items VALUES (?, ?, ?)", rows)
