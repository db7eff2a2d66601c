"""The events of responses in the background, written as they come and read by any app process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator

from tessera.app.openai.responses.store import ResponseStore, guarded

POLL = 0.1  # seconds between two looks for new events
DEAD_AFTER = 30.0  # seconds without a sign of life of the process that works on a response
EVENT_END = b"\n\n"


class Journal:
    """Beside the stored responses, and evicted with them. Every method may raise StoreUnavailableError."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def begin(self, tenant: str, response_id: str) -> None:
        with guarded("stored"):
            self._store.database.execute(
                "INSERT INTO jobs (tenant, id, alive) VALUES (?, ?, ?)", (tenant, response_id, time.time())
            )

    def append(self, tenant: str, response_id: str, first: int, events: bytes) -> None:
        """Add events, of which the first has the number `first`; none are a sign of life."""
        with guarded("stored"):
            database = self._store.database
            if events:
                database.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (tenant, response_id, first, events))
            database.execute(
                "UPDATE jobs SET alive = ? WHERE tenant = ? AND id = ?", (time.time(), tenant, response_id)
            )

    def end(self, tenant: str, response_id: str) -> None:
        self._set("ended", tenant, response_id)

    def cancel(self, tenant: str, response_id: str) -> None:
        """Ask the process that works on the response to stop."""
        self._set("cancelled", tenant, response_id)

    def is_cancelled(self, tenant: str, response_id: str) -> bool:
        """True also where the response has been deleted."""
        row = self._job("cancelled", tenant, response_id)
        return row is None or bool(row)

    def has_ended(self, tenant: str, response_id: str) -> bool:
        """Whether no more events come; the process that worked on it may have died."""
        if self._job("ended", tenant, response_id) != 0:
            return True
        alive = self._job("alive", tenant, response_id)
        return alive is None or time.time() - alive > DEAD_AFTER

    def events_from(self, tenant: str, response_id: str, number: int) -> Iterator[tuple[int, bytes]]:
        """Pieces of whole events from the one that holds event `number`, each with its first event's number."""
        with guarded("read"):
            rows = self._store.database.execute(
                """SELECT first, data FROM events WHERE tenant = :tenant AND id = :id AND first >= COALESCE(
                    (SELECT MAX(first) FROM events WHERE tenant = :tenant AND id = :id AND first <= :number), 0)
                ORDER BY first""",
                {"tenant": tenant, "id": response_id, "number": number},
            ).fetchall()
        yield from rows

    def _set(self, column: str, tenant: str, response_id: str) -> None:
        with guarded("changed"):
            self._store.database.execute(
                f"UPDATE jobs SET {column} = 1 WHERE tenant = ? AND id = ?", (tenant, response_id)
            )

    def _job(self, column: str, tenant: str, response_id: str) -> float | None:
        with guarded("read"):
            row = self._store.database.execute(
                f"SELECT {column} FROM jobs WHERE tenant = ? AND id = ?", (tenant, response_id)
            ).fetchone()
        return row[0] if row is not None else None


class JournalReader:
    """A response's events after number `after`, to the end, as the source of an event stream."""

    def __init__(self, journal: Journal, tenant: str, response_id: str, after: int = -1) -> None:
        self._journal = journal
        self._key = (tenant, response_id)
        self._next = after + 1

    async def wait_accepted(self) -> None:
        """The engine took the request before the journal was begun."""

    async def deltas(self) -> AsyncGenerator[bytes, None]:
        while True:
            ended = self._journal.has_ended(*self._key)
            for first, data in self._journal.events_from(*self._key, self._next):
                events = data.split(EVENT_END)[:-1]
                if fresh := events[max(0, self._next - first) :]:
                    self._next = first + len(events)
                    yield EVENT_END.join(fresh) + EVENT_END
            if ended:
                return
            await asyncio.sleep(POLL)

    async def abort(self) -> None:
        """The response goes on without its readers."""
