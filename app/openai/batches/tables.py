"""The tables of batches, and the changes of state that they go through, each of them one transaction.

A batch is worked on by one process, its owner. Every change that the owner makes asks whether it still is the owner,
and a result is kept under its line's number, so a line has one result however often it is run.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import orjson

from tessera.app.store.objects import ObjectTable, drop_content
from tessera.app.store.schema import Schema

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

ACTIVE = "('validating', 'in_progress', 'finalizing', 'cancelling')"
LINE_BITS = 32  # a result's key is its batch's number and, in the lowest bits, its line's

BATCHES_SCHEMA = Schema(
    "batches",
    (
        (
            """CREATE TABLE batches (
                seq INTEGER PRIMARY KEY REFERENCES objects (seq) ON DELETE CASCADE, tenant TEXT NOT NULL,
                status TEXT NOT NULL, models TEXT NOT NULL, deadline REAL NOT NULL, owner TEXT NOT NULL DEFAULT '',
                completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
                input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
                output_tokens INTEGER NOT NULL DEFAULT 0, reasoning_tokens INTEGER NOT NULL DEFAULT 0
            )""",
            f"CREATE INDEX active_batches ON batches (seq) WHERE status IN {ACTIVE}",
            "CREATE TABLE batch_results (key INTEGER PRIMARY KEY, failed INTEGER NOT NULL, result BLOB NOT NULL)",
            f"""CREATE TRIGGER delete_results AFTER DELETE ON batches BEGIN
                DELETE FROM batch_results
                WHERE key BETWEEN old.seq << {LINE_BITS} AND ((old.seq + 1) << {LINE_BITS}) - 1;
            END""",
        ),
    ),
)

# Of each tenant the oldest batches first, so that none waits for all the batches of another.
CANDIDATES = f"""
    SELECT seq, tenant FROM (
        SELECT seq, tenant, ROW_NUMBER() OVER (PARTITION BY tenant ORDER BY seq) AS place FROM batches
        WHERE status IN {ACTIVE} AND (models = :models OR deadline < :now)
    ) ORDER BY place, seq LIMIT :limit"""
ADD_RESULTS = """
    UPDATE batches SET completed = completed + :completed, failed = failed + :failed,
        input_tokens = input_tokens + :input_tokens, cached_tokens = cached_tokens + :cached_tokens,
        output_tokens = output_tokens + :output_tokens, reasoning_tokens = reasoning_tokens + :reasoning_tokens
    WHERE seq = :seq"""
COUNTERS = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


class OwnerLostError(Exception):
    """Another process works on the batch now, or it has been deleted."""


@dataclass(slots=True)
class TokenUsage:
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def count(self, other: TokenUsage) -> None:
        for name in (field.name for field in fields(TokenUsage)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line: a line of the output file, or, where it failed, of the error file."""

    number: int
    failed: bool
    data: bytes
    usage: TokenUsage


class Candidate(NamedTuple):
    """A batch that has not ended, and whose it is."""

    seq: int
    tenant: str


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch as its owner sees it.

    Attributes:
        body: the fields of the batch object that are not counted.
        deadline: Unix time at which it expires.
    """

    seq: int
    id: str
    tenant: str
    status: Status
    deadline: float
    body: dict[str, Any]


def insert_batch(
    database: sqlite3.Connection,
    table: ObjectTable,
    tenant: str,
    batch_id: str,
    body: dict[str, Any],
    *,
    models: str,
    deadline: float,
    input_bytes: int,
    max_count: int,
) -> None:
    """Store a new batch, whose input has been linked; the tenant's oldest that have ended make room for it."""
    count, _ = table.usage(database, tenant)
    database.execute(
        f"""DELETE FROM objects WHERE seq IN (
            SELECT seq FROM batches WHERE tenant = ? AND status NOT IN {ACTIVE} ORDER BY seq LIMIT ?)""",
        (tenant, max(0, count + 1 - max_count)),
    )
    seq = table.insert(
        database, tenant, batch_id, orjson.dumps(body), extra_bytes=input_bytes, has_content=True, is_aging=False
    )
    database.execute(
        "INSERT INTO batches (seq, tenant, status, models, deadline) VALUES (?, ?, 'validating', ?, ?)",
        (seq, tenant, models, deadline),
    )


def candidates(database: sqlite3.Connection, models: str, limit: int) -> list[Candidate]:
    """Batches to be worked on by a server of these models; those that are over by any server."""
    rows = database.execute(CANDIDATES, {"models": models, "now": time.time(), "limit": limit})
    return [Candidate(*row) for row in rows]


def claim(database: sqlite3.Connection, seq: int, owner: str) -> BatchRow | None:
    """Make `owner` the owner, who has the lock of this batch; None where nothing is to be done any more."""
    claimed = database.execute(f"UPDATE batches SET owner = ? WHERE seq = ? AND status IN {ACTIVE}", (owner, seq))
    return read_owned(database, seq, owner) if claimed.rowcount else None


def read_owned(database: sqlite3.Connection, seq: int, owner: str) -> BatchRow:
    """Raises OwnerLostError."""
    row = database.execute(
        """SELECT id, objects.tenant, status, deadline, body FROM batches JOIN objects USING (seq)
        WHERE seq = ? AND owner = ?""",
        (seq, owner),
    ).fetchone()
    if row is None:
        raise OwnerLostError
    batch_id, tenant, status, deadline, body = row
    return BatchRow(seq, batch_id, tenant, status, deadline, orjson.loads(body))


def change_status(
    database: sqlite3.Connection, seq: int, status: Status, changes: dict[str, Any], *, owner: str | None = None
) -> None:
    """Change the status and, in the body, what comes with it. With `owner`, raises OwnerLostError."""
    if owner is not None:
        read_owned(database, seq, owner)
    (body,) = database.execute("SELECT body FROM objects WHERE seq = ?", (seq,)).fetchone()
    database.execute("UPDATE batches SET status = ? WHERE seq = ?", (status, seq))
    database.execute(
        "UPDATE objects SET body = ? WHERE seq = ?", (orjson.dumps({**orjson.loads(body), **changes}), seq)
    )


def save_results(database: sqlite3.Connection, seq: int, owner: str, results: Sequence[LineResult]) -> Status:
    """Store results and count them; -> the batch's status. Raises OwnerLostError."""
    row = database.execute("SELECT status FROM batches WHERE seq = ? AND owner = ?", (seq, owner)).fetchone()
    if row is None:
        raise OwnerLostError
    counts = dict.fromkeys(COUNTERS, 0)
    usage, size = TokenUsage(), 0
    for result in results:
        stored = database.execute(
            "INSERT OR IGNORE INTO batch_results VALUES (?, ?, ?)",
            (seq << LINE_BITS | result.number, result.failed, result.data),
        )
        if stored.rowcount:
            counts["failed" if result.failed else "completed"] += 1
            usage.count(result.usage)
            size += len(result.data)
    if size:
        database.execute(ADD_RESULTS, {**counts, **{name: getattr(usage, name) for name in COUNTERS[2:]}, "seq": seq})
        database.execute("UPDATE objects SET size = size + ? WHERE seq = ?", (size, seq))
    status: Status = row[0]
    return status


def lines_done(database: sqlite3.Connection, seq: int) -> set[int]:
    """The numbers of the lines that have a result."""
    return {
        number for (number,) in database.execute(f"SELECT key & {2**LINE_BITS - 1} FROM batch_results WHERE {_of(seq)}")
    }


def results_after(database: sqlite3.Connection, seq: int, number: int, max_bytes: int) -> list[tuple[int, bool, bytes]]:
    """Results after line `number`, in the order of their lines: number, whether it failed, data.

    As many as have `max_bytes` together, and one more.
    """
    found: list[tuple[int, bool, bytes]] = []
    num_bytes = 0
    for line, failed, data in database.execute(
        f"""SELECT key & {2**LINE_BITS - 1}, failed, result FROM batch_results
        WHERE {_of(seq)} AND key > ? ORDER BY key""",
        (seq << LINE_BITS | number,),
    ):
        found.append((line, bool(failed), data))
        num_bytes += len(data)
        if num_bytes > max_bytes:
            break
    return found


def finish(
    database: sqlite3.Connection,
    seq: int,
    owner: str,
    status: Status,
    changes: dict[str, Any],
    expires: float | None,
) -> None:
    """End a batch; its input goes, and its results, as they are in its files now. Raises OwnerLostError."""
    change_status(database, seq, status, changes, owner=owner)
    database.execute(f"DELETE FROM batch_results WHERE {_of(seq)}")
    drop_content(database, seq)
    database.execute("UPDATE objects SET size = LENGTH(body), expires = ? WHERE seq = ?", (expires, seq))


def counters(database: sqlite3.Connection, seq: int) -> tuple[Status, dict[str, int]]:
    status, *counts = database.execute(
        f"SELECT status, {', '.join(COUNTERS)} FROM batches WHERE seq = ?", (seq,)
    ).fetchone()
    return status, dict(zip(COUNTERS, counts, strict=True))


def _of(seq: int) -> str:
    return f"key BETWEEN {seq << LINE_BITS} AND {((seq + 1) << LINE_BITS) - 1}"
