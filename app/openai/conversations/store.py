"""Stored conversations and their items. Every method may raise StoreUnavailableError or StoreFullError."""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Request

from tessera.app.openai.conversations.item_list import new_item_id
from tessera.app.openai.pages import PageRequest, list_object, unknown_after
from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.settings import AppSettings
from tessera.app.store.objects import ObjectTable, StoredObject, StoreLimits
from tessera.app.store.schema import Schema
from tessera.app.store.store import Store
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError, RequestError

logger = logging.getLogger("tessera.app")

CONVERSATIONS = Schema(
    "conversations",
    (
        (
            """CREATE TABLE conversation_items (
                seq INTEGER NOT NULL REFERENCES objects (seq) ON DELETE CASCADE, number INTEGER NOT NULL,
                id TEXT NOT NULL, item BLOB NOT NULL, PRIMARY KEY (seq, number), UNIQUE (seq, id)
            ) WITHOUT ROWID""",
            "CREATE INDEX conversation_items_by_id ON conversation_items (id)",
        ),
    ),
)
ITEM_BYTES = "SELECT COUNT(*), COALESCE(MAX(number), 0), COALESCE(SUM(LENGTH(item)), 0) FROM conversation_items"
FIND_ITEM = """
    SELECT item FROM conversation_items JOIN objects USING (seq)
    WHERE objects.kind = 'conversation' AND objects.tenant = ? AND conversation_items.id = ?"""


class ConversationStore:
    """At most `max_count` conversations and `max_bytes` of them per tenant; beyond, the least recently used ones go."""

    def __init__(self, store: Store, settings: AppSettings) -> None:
        self._store = store
        self._table = ObjectTable(
            "conversation",
            StoreLimits.of(settings),
            max_count=settings.max_stored_objects,
            max_bytes=settings.max_stored_bytes,
            evicts=True,
        )

    async def create(self, tenant: str, metadata: dict[str, str], items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """-> the conversation object."""
        conversation_id = f"conv_{secrets.token_hex(24)}"
        conversation = {
            "id": conversation_id,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }

        def change(database: sqlite3.Connection) -> None:
            self._table.insert(database, tenant, conversation_id, orjson.dumps(conversation))
            self._append(database, self._found(database, tenant, conversation_id), items)

        await self._store.transact(change)
        return conversation

    async def find(self, tenant: str, conversation_id: str) -> dict[str, Any]:
        """The conversation object. Raises NotFoundError."""
        found = await self._store.query(lambda database: self._found(database, tenant, conversation_id))
        return _object_of(found)

    async def replace_metadata(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        """-> the conversation object. Raises NotFoundError."""

        def change(database: sqlite3.Connection) -> dict[str, Any]:
            found = self._found(database, tenant, conversation_id)
            conversation = {**_object_of(found), "metadata": metadata}
            self._write(database, found, orjson.dumps(conversation))
            return conversation

        return await self._store.transact(change)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Raises NotFoundError."""
        if not await self._store.transact(lambda database: self._table.delete(database, tenant, conversation_id)):
            raise _not_found(conversation_id)

    async def append(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """-> the items as they are stored: with a new id where the conversation has an item of theirs already.

        Raises:
            NotFoundError: there is no such conversation.
            InvalidRequestError: it has too many items.
        """

        def change(database: sqlite3.Connection) -> list[dict[str, Any]]:
            found = self._found(database, tenant, conversation_id)
            self._table.mark_used(database, tenant, conversation_id)
            return self._append(database, found, items)

        return await self._store.transact(change)

    async def append_if_possible(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> None:
        """`append` what has been given out already; the log says why something could not be appended."""
        try:
            await self.append(tenant, conversation_id, items)
        except RequestError as error:
            logger.warning("a response is not added to its conversation: %s", error.message)

    async def items(self, tenant: str, conversation_id: str) -> list[dict[str, Any]]:
        """All of them, in order. Raises NotFoundError."""

        def query(database: sqlite3.Connection) -> list[dict[str, Any]]:
            found = self._found(database, tenant, conversation_id)
            rows = database.execute("SELECT item FROM conversation_items WHERE seq = ? ORDER BY number", (found.seq,))
            return [orjson.loads(item) for (item,) in rows]

        return await self._store.query(query)

    async def item_page(self, tenant: str, conversation_id: str, page: PageRequest) -> dict[str, Any]:
        """Raises NotFoundError, or InvalidRequestError where there is no item `after`."""

        def query(database: sqlite3.Connection) -> dict[str, Any]:
            found = self._found(database, tenant, conversation_id)
            order, bound = ("ASC", ">") if page.ascending else ("DESC", "<")
            after, values = "", [found.seq]
            if page.after is not None:
                first = database.execute(
                    "SELECT number FROM conversation_items WHERE seq = ? AND id = ?", (found.seq, page.after)
                ).fetchone()
                if first is None:
                    raise unknown_after("conversation's items")
                after, values = f"AND number {bound} ?", [found.seq, first[0]]
            rows = database.execute(
                f"SELECT item FROM conversation_items WHERE seq = ? {after} ORDER BY number {order} LIMIT ?",
                (*values, page.limit + 1),
            ).fetchall()
            items = [orjson.loads(item) for (item,) in rows]
            return list_object(items[: page.limit], has_more=len(items) > page.limit)

        return await self._store.query(query)

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Raises NotFoundError."""

        def query(database: sqlite3.Connection) -> Any:
            found = self._found(database, tenant, conversation_id)
            return database.execute(
                "SELECT item FROM conversation_items WHERE seq = ? AND id = ?", (found.seq, item_id)
            ).fetchone()

        row = await self._store.query(query)
        if row is None:
            raise _no_item(item_id)
        item: dict[str, Any] = orjson.loads(row[0])
        return item

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """-> the conversation object. Raises NotFoundError."""

        def change(database: sqlite3.Connection) -> StoredObject:
            found = self._found(database, tenant, conversation_id)
            deleted = database.execute("DELETE FROM conversation_items WHERE seq = ? AND id = ?", (found.seq, item_id))
            if deleted.rowcount == 0:
                raise _no_item(item_id)
            self._write(database, found, found.body)
            return found

        return _object_of(await self._store.transact(change))

    async def find_item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """An item of any of the tenant's conversations."""
        row = await self._store.query(lambda database: database.execute(FIND_ITEM, (tenant, item_id)).fetchone())
        return orjson.loads(row[0]) if row is not None else None

    def _found(self, database: sqlite3.Connection, tenant: str, conversation_id: str) -> StoredObject:
        found = self._table.find(database, tenant, conversation_id)
        if found is None:
            raise _not_found(conversation_id)
        return found

    def _append(
        self, database: sqlite3.Connection, found: StoredObject, items: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        count, number, _ = _item_bytes(database, found.seq)
        if count + len(items) > MAX_MESSAGES:
            raise InvalidRequestError(f"A conversation may have at most {MAX_MESSAGES} items.", param="items")
        known = {
            item_id for (item_id,) in database.execute("SELECT id FROM conversation_items WHERE seq = ?", (found.seq,))
        }
        stored = []
        for item in items:
            if item["id"] in known:
                item = {**item, "id": new_item_id(item["type"])}
            known.add(item["id"])
            stored.append(item)
        encoded = [orjson.dumps(item) for item in stored]
        self._table.make_room(database, found.tenant, sum(map(len, encoded)))
        if self._table.find(database, found.tenant, found.id) is None:  # it alone is too large
            raise _not_found(found.id)
        database.executemany(
            "INSERT INTO conversation_items VALUES (?, ?, ?, ?)",
            [
                (found.seq, number + place, item["id"], text)
                for place, (item, text) in enumerate(zip(stored, encoded, strict=True), 1)
            ],
        )
        self._write(database, found, found.body)
        return stored

    def _write(self, database: sqlite3.Connection, found: StoredObject, body: bytes) -> None:
        *_, num_bytes = _item_bytes(database, found.seq)
        self._table.replace_body(database, found.tenant, found.id, body, extra_bytes=num_bytes)


def conversations_of(request: Request) -> ConversationStore:
    conversations: Any = request.app.state.conversations
    assert isinstance(conversations, ConversationStore)
    return conversations


def _item_bytes(database: sqlite3.Connection, seq: int) -> tuple[int, int, int]:
    """Number, greatest number and bytes of a conversation's items."""
    count, number, num_bytes = database.execute(f"{ITEM_BYTES} WHERE seq = ?", (seq,)).fetchone()
    return count, number, num_bytes


def _object_of(found: StoredObject) -> dict[str, Any]:
    conversation: dict[str, Any] = orjson.loads(found.body)
    return conversation


def _not_found(conversation_id: str) -> NotFoundError:
    return NotFoundError(f"There is no conversation {conversation_id[:100]!r} here.", code="conversation_not_found")


def _no_item(item_id: str) -> NotFoundError:
    return NotFoundError(f"The conversation has no item {item_id[:100]!r}.", code="item_not_found")
