"""Responses that are stored for `previous_response_id` and for retrieval, within bounds.

They are stored in SQLite: in memory, or in a file that the app processes of one server share.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson
from pydantic import TypeAdapter

from tessera.app.schema.chat import ChatMessage
from tessera.engine.contract.errors import EngineError

logger = logging.getLogger("tessera.app")


class StoreUnavailableError(EngineError):
    """The stored responses cannot be read or changed, for example because the disk is full or read-only."""

    status = 503
    code = "response_store_unavailable"

    def __init__(self) -> None:
        super().__init__("The kept responses cannot be read or changed at the moment; please try again later.")


LOCK_TIMEOUT = 5.0  # seconds; another process holds the file for a millisecond or two
MESSAGES: TypeAdapter[tuple[ChatMessage, ...]] = TypeAdapter(tuple[ChatMessage, ...])

TABLE = """
    CREATE TABLE IF NOT EXISTS responses (
        tenant TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL,
        response BLOB NOT NULL, messages BLOB NOT NULL, input_items BLOB NOT NULL, PRIMARY KEY (tenant, id)
    )"""
INDEX = "CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used, size)"
NEXT_USE = "(SELECT COALESCE(MAX(used), 0) + 1 FROM responses WHERE tenant = :tenant)"
INSERT = f"""
    INSERT OR REPLACE INTO responses
    VALUES (:tenant, :id, {NEXT_USE}, :size, :response, :messages, :input_items)"""
SELECT = "SELECT response, messages, input_items FROM responses WHERE tenant = :tenant AND id = :id"
TOUCH = f"UPDATE responses SET used = {NEXT_USE} WHERE tenant = :tenant AND id = :id"
DELETE = "DELETE FROM responses WHERE tenant = :tenant AND id = :id"
BY_USE = "SELECT used, size FROM responses WHERE tenant = :tenant ORDER BY used DESC"
DELETE_UP_TO = "DELETE FROM responses WHERE tenant = :tenant AND used <= :used"


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """A response, its input items, and the conversation up to and including it, without instructions."""

    response: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    input_items: tuple[dict[str, Any], ...] = ()

    def encoded(self) -> tuple[bytes, bytes, bytes]:
        """The columns of its row; messages that several responses share are stored, and counted, for each."""
        messages = MESSAGES.dump_json(self.messages, exclude_none=True)
        return orjson.dumps(self.response), messages, orjson.dumps(self.input_items)


class ResponseStore:
    """At most `max_count` responses and `max_bytes` per tenant; beyond either the least recently used ones go.

    `path` names the file, in a folder of the server's own; None keeps everything in this process.
    """

    def __init__(self, max_count: int, max_bytes: int, path: str | None = None) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._path = path

    @property
    def keeps_anything(self) -> bool:
        return self._max_count > 0

    def store_response(self, tenant: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is beyond the bounds, or the file cannot take it."""
        row = stored.encoded()
        size = sum(map(len, row))
        if size > self._max_bytes or not self.keeps_anything:
            return
        try:
            with self._database as database:
                database.execute("BEGIN IMMEDIATE")
                response, messages, input_items = row
                values = {"response": response, "messages": messages, "input_items": input_items}
                database.execute(INSERT, {"tenant": tenant, "id": stored.response["id"], "size": size, **values})
                self._evict(tenant)
        except sqlite3.Error as error:
            logger.warning("an answer of /v1/responses is not kept: %s", error)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A stored response, or None. Raises StoreUnavailableError."""
        with _guarded("read"):
            row = self._database.execute(SELECT, {"tenant": tenant, "id": response_id}).fetchone()
        if row is None:
            return None
        with contextlib.suppress(StoreUnavailableError), _guarded("marked as used"):
            self._database.execute(TOUCH, {"tenant": tenant, "id": response_id})
        response, messages, input_items = row
        return StoredResponse(
            orjson.loads(response), MESSAGES.validate_json(messages), tuple(orjson.loads(input_items))
        )

    def delete(self, tenant: str, response_id: str) -> bool:
        """-> whether there was one. Raises StoreUnavailableError."""
        with _guarded("deleted"):
            return self._database.execute(DELETE, {"tenant": tenant, "id": response_id}).rowcount > 0

    def _evict(self, tenant: str) -> None:
        num_bytes = 0
        for count, (used, size) in enumerate(self._database.execute(BY_USE, {"tenant": tenant}).fetchall(), start=1):
            num_bytes += size
            if count > self._max_count or num_bytes > self._max_bytes:
                self._database.execute(DELETE_UP_TO, {"tenant": tenant, "used": used})
                return

    @cached_property
    def _database(self) -> sqlite3.Connection:
        """Opened for the first response, on the event loop's thread, which alone uses it."""
        database = sqlite3.connect(
            self._path or ":memory:", timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")  # it is gone with the server in any case
            database.execute(TABLE)
            database.execute(INDEX)
        except sqlite3.Error:
            database.close()  # the next use tries again
            raise
        weakref.finalize(self, database.close)
        return database


@contextlib.contextmanager
def _guarded(what: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        logger.warning("an answer of /v1/responses cannot be %s: %s", what, error)
        raise StoreUnavailableError from error
