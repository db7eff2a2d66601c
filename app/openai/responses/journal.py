"""The events of responses in the background, written as they come and read by any app process."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson

from tessera.app.openai.responses.store import ResponseStore, StoredResponse, insert_items
from tessera.app.store.errors import StoreFullError
from tessera.app.store.locks import ProcessLocks
from tessera.app.store.store import Store

READ_BYTES = 2**20  # of one response that are read at a time, and a piece more
EVENT_END = b"\n\n"
FIRST_OWNER = 2**40  # locks below are those of batches
NUM_OWNERS = 2**40
GOING = """
    SELECT seq, objects.tenant FROM response_jobs JOIN objects USING (seq)
    WHERE NOT cancelled AND seq IN (SELECT value FROM json_each(?))"""
DIED = {"code": "server_error", "message": "The server ended while it worked on this response."}


class JobOwner:
    """This app process as the owner of jobs. A lock, which the kernel lets go of when it dies, shows that it lives.

    Attributes:
        running: the jobs that it works on, by `seq`.
    """

    def __init__(self, store: Store) -> None:
        self.running: set[int] = set()
        self._store = store
        self._number = FIRST_OWNER + secrets.randbelow(NUM_OWNERS)
        self._has_lock = False

    async def number(self) -> int:
        """The number by which other processes find out whether this one lives."""
        if not self._has_lock:
            self._has_lock = await self._store.with_locks(lambda locks: locks.try_lock(self._number))
        return self._number

    async def works_on(self, owner: int, seq: int) -> bool:
        """Whether `owner`, this or another process, is still at the job `seq`."""
        if owner == self._number:
            return seq in self.running

        def probe(locks: ProcessLocks) -> bool:
            if not locks.try_lock(owner):
                return True
            locks.unlock(owner)
            return False

        return await self._store.with_locks(probe)


@dataclass(frozen=True, slots=True)
class JournalPart:
    """Pieces of whole events, each with its first event's number, and the job's state when they were read.

    Attributes:
        ended: no more events come after these.
    """

    seq: int
    owner: int
    ended: bool
    pieces: Sequence[tuple[int, bytes]]


class AskedEvents(NamedTuple):
    """Those of a response from the one with the number `number` on."""

    tenant: str
    response_id: str
    number: int


@dataclass(frozen=True, slots=True)
class NewEvents:
    """Whole events of a job, of which the first has the number `first`; or none."""

    seq: int
    first: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Appended:
    """The jobs that go on, and those of them for whose events there is no room.

    A job does not go on where it has been cancelled or its response deleted.
    """

    going: Set[int]
    full: Set[int]


class Journal:
    """Beside the stored responses, and evicted with them. Methods raise StoreUnavailableError and StoreFullError."""

    def __init__(self, responses: ResponseStore, owner: JobOwner) -> None:
        self._store = responses.store
        self._table = responses.table
        self._owner = owner

    async def begin(self, tenant: str, stored: StoredResponse) -> int:
        """Store a response that this process begins to work on; -> its `seq`."""
        owner = await self._owner.number()

        def change(database: sqlite3.Connection) -> int:
            seq = self._table.insert(database, tenant, stored.response["id"], stored.encoded())
            database.execute("INSERT INTO response_jobs (seq, owner) VALUES (?, ?)", (seq, owner))
            return seq

        seq = await self._store.transact(change)
        self._owner.running.add(seq)
        return seq

    async def append(self, jobs: Sequence[NewEvents]) -> Appended:
        """Add events of several jobs; they count with their responses."""
        seqs = orjson.dumps([new.seq for new in jobs]).decode()

        def going(database: sqlite3.Connection) -> dict[int, str]:
            """Tenants by `seq`."""
            return dict(database.execute(GOING, (seqs,)))

        def change(database: sqlite3.Connection) -> Appended:
            tenants = going(database)
            appended = [new for new in jobs if new.data and new.seq in tenants]
            for new in appended:
                _insert_events(database, new.seq, new.first, new.data)
                database.execute("UPDATE objects SET size = size + ? WHERE seq = ?", (len(new.data), new.seq))
            full = set()
            for tenant in {tenants[new.seq] for new in appended}:
                try:
                    self._table.make_room(database, tenant, 0)
                except StoreFullError:
                    full.add(tenant)
            return Appended(set(tenants), {seq for seq, tenant in tenants.items() if tenant in full})

        if any(new.data for new in jobs):
            return await self._store.transact(change)
        return Appended(set(await self._store.query(going)), set())

    async def end(self, tenant: str, seq: int, stored: StoredResponse, first: int, events: bytes) -> None:
        """Store a response in its last state, with its last events; nothing where it has been deleted."""
        try:
            await self._store.transact(lambda database: self._end(database, tenant, seq, stored, first, events))
        finally:
            self._owner.running.discard(seq)

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Ask the process that works on the response to stop."""

        def change(database: sqlite3.Connection) -> None:
            found = self._table.find(database, tenant, response_id)
            if found is not None:
                database.execute("UPDATE response_jobs SET cancelled = 1 WHERE seq = ?", (found.seq,))

        await self._store.transact(change)

    async def read(self, asked: Sequence[AskedEvents]) -> list[JournalPart | None]:
        """For each the events from the piece on that holds event `number`; None where there is no such response."""
        return await self._store.query(lambda database: [self._read(database, each) for each in asked])

    async def is_at_work(self, part: JournalPart) -> bool:
        """Whether the process that works on the response does so still."""
        return await self._owner.works_on(part.owner, part.seq)

    async def settle(self, tenant: str, response_id: str, part: JournalPart) -> bool:
        """End a response whose process has died as failed; -> whether it has ended."""
        if part.ended:
            return True
        if await self.is_at_work(part):
            return False

        def change(database: sqlite3.Connection) -> None:
            found = self._table.find(database, tenant, response_id)
            job = database.execute("SELECT ended FROM response_jobs WHERE seq = ?", (part.seq,)).fetchone()
            if found is None or job is None or job[0]:
                return
            stored = StoredResponse.decoded(found.body)
            response = {**stored.response, "status": "failed", "error": DIED}
            number = _num_events(database, part.seq)
            event = {"type": "response.failed", "sequence_number": number, "response": response}
            events = b"event: response.failed\ndata: %b\n\n" % orjson.dumps(event)
            self._end(database, tenant, part.seq, replace(stored, response=response), number, events)

        await self._store.transact(change)
        return True

    def _read(self, database: sqlite3.Connection, asked: AskedEvents) -> JournalPart | None:
        found = self._table.find(database, asked.tenant, asked.response_id)
        if found is None:
            return None
        owner, ended = database.execute("SELECT owner, ended FROM response_jobs WHERE seq = ?", (found.seq,)).fetchone()
        rows = database.execute(
            """SELECT first, data FROM response_events WHERE seq = :seq AND first >= COALESCE(
                (SELECT MAX(first) FROM response_events WHERE seq = :seq AND first <= :number), 0)
            ORDER BY first""",
            {"seq": found.seq, "number": asked.number},
        )
        pieces: list[tuple[int, bytes]] = []
        num_bytes = 0
        for first, data in rows:
            if num_bytes > READ_BYTES:
                return JournalPart(found.seq, owner, False, pieces)
            pieces.append((first, data))
            num_bytes += len(data)
        return JournalPart(found.seq, owner, bool(ended), pieces)

    def _end(
        self, database: sqlite3.Connection, tenant: str, seq: int, stored: StoredResponse, first: int, events: bytes
    ) -> None:
        response_id, body = stored.response["id"], stored.encoded()
        found = self._table.find(database, tenant, response_id)
        if found is None or found.seq != seq:
            return
        _insert_events(database, seq, first, events)
        (num_bytes,) = database.execute(
            "SELECT SUM(LENGTH(data)) FROM response_events WHERE seq = ?", (seq,)
        ).fetchone()
        self._table.mark_used(database, tenant, response_id)
        self._table.make_room(database, tenant, len(body) + num_bytes - found.size)
        if self._table.replace_body(database, tenant, response_id, body, extra_bytes=num_bytes):
            insert_items(database, tenant, seq, stored)
            database.execute("UPDATE response_jobs SET ended = 1 WHERE seq = ?", (seq,))


def _insert_events(database: sqlite3.Connection, seq: int, first: int, events: bytes) -> None:
    if events:
        database.execute("INSERT INTO response_events VALUES (?, ?, ?)", (seq, first, events))


def _num_events(database: sqlite3.Connection, seq: int) -> int:
    last: Any = database.execute(
        "SELECT first, data FROM response_events WHERE seq = ? ORDER BY first DESC LIMIT 1", (seq,)
    ).fetchone()
    return 0 if last is None else last[0] + last[1].count(EVENT_END)
