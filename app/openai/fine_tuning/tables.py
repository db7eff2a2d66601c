"""The tables of fine-tuning jobs, and the changes of state that they go through, each of them one transaction.

A job is worked on by one process, its owner, and every change that the owner makes asks whether it still is.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from tessera.app.openai.fine_tuning.objects import JobStatus
from tessera.app.store.objects import ObjectTable
from tessera.app.store.schema import Schema

Level = Literal["info", "warn", "error"]

DUE = "('queued', 'validating_files', 'running')"  # those that a process is to work on
ACTIVE = "('queued', 'validating_files', 'running', 'paused')"
ENDED: tuple[JobStatus, ...] = ("succeeded", "failed", "cancelled")
MAX_EVENTS = 2000  # of one job; the oldest go
MAX_SUMMARIES, MAX_POINTS = 5, 100  # on the page: jobs, and losses of each

FINE_TUNING_SCHEMA = Schema(
    "fine_tuning",
    (
        (
            """CREATE TABLE fine_tuning_jobs (
                seq INTEGER PRIMARY KEY REFERENCES objects (seq) ON DELETE CASCADE, tenant TEXT NOT NULL,
                base TEXT NOT NULL, status TEXT NOT NULL, owner TEXT NOT NULL DEFAULT '',
                step INTEGER NOT NULL DEFAULT 0, num_steps INTEGER NOT NULL DEFAULT 0, finish REAL,
                has_result INTEGER NOT NULL DEFAULT 0
            )""",
            f"CREATE INDEX active_fine_tuning_jobs ON fine_tuning_jobs (seq) WHERE status IN {ACTIVE}",
            """CREATE TABLE fine_tuning_events (
                number INTEGER PRIMARY KEY AUTOINCREMENT,
                job INTEGER NOT NULL REFERENCES fine_tuning_jobs (seq) ON DELETE CASCADE,
                id TEXT NOT NULL, created INTEGER NOT NULL, level TEXT NOT NULL, message TEXT NOT NULL,
                step INTEGER, loss REAL, validation_loss REAL
            )""",
            "CREATE INDEX fine_tuning_events_of_job ON fine_tuning_events (job, number)",
            """CREATE TABLE fine_tuning_checkpoints (
                job INTEGER NOT NULL REFERENCES fine_tuning_jobs (seq) ON DELETE CASCADE, step INTEGER NOT NULL,
                id TEXT NOT NULL, created INTEGER NOT NULL, loss REAL NOT NULL, validation_loss REAL,
                PRIMARY KEY (job, step)
            )""",
            """CREATE TABLE fine_tuning_totals (
                one INTEGER PRIMARY KEY CHECK (one = 1), steps INTEGER NOT NULL, tokens INTEGER NOT NULL
            )""",
            "INSERT INTO fine_tuning_totals VALUES (1, 0, 0)",
        ),
        ("ALTER TABLE fine_tuning_jobs ADD COLUMN turn_ended REAL NOT NULL DEFAULT 0",),
    ),
)

# Jobs that were interrupted first, then of each tenant the oldest, so that none waits for all the jobs of another; of
# these the one whose last turn was the longest ago.
CANDIDATES = f"""
    SELECT seq FROM (
        SELECT seq, status, turn_ended, ROW_NUMBER() OVER (PARTITION BY tenant ORDER BY seq) AS place
        FROM fine_tuning_jobs
        WHERE status IN {DUE} AND base IN (SELECT value FROM json_each(?))
    ) ORDER BY status = 'queued', place, turn_ended, seq LIMIT 1"""
OTHERS = f"""
    SELECT EXISTS (
        SELECT 1 FROM fine_tuning_jobs JOIN (SELECT tenant AS own FROM fine_tuning_jobs WHERE seq = ?) ON tenant != own
        WHERE status IN {DUE} AND base IN (SELECT value FROM json_each(?)))"""


class OwnerLostError(Exception):
    """Another process works on the job now, or it has been deleted."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as its owner sees it.

    Attributes:
        result_name: of the model that it makes.
        body: the fields of its object that change seldom.
    """

    seq: int
    id: str
    tenant: str
    result_name: str
    status: JobStatus
    step: int
    num_steps: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A step for the job's events and checkpoints."""

    step: int
    loss: float
    validation_loss: float | None


def insert_job(database: sqlite3.Connection, seq: int, tenant: str, base: str) -> None:
    database.execute(
        "INSERT INTO fine_tuning_jobs (seq, tenant, base, status) VALUES (?, ?, ?, 'queued')", (seq, tenant, base)
    )


def num_active(database: sqlite3.Connection, tenant: str) -> int:
    query = f"SELECT COUNT(*) FROM fine_tuning_jobs WHERE tenant = ? AND status IN {ACTIVE}"
    (count,) = database.execute(query, (tenant,)).fetchone()
    return int(count)


def num_results(database: sqlite3.Connection, tenant: str) -> int:
    """Of a tenant, with those that jobs are yet to make."""
    query = f"SELECT COUNT(*) FROM fine_tuning_jobs WHERE tenant = ? AND (has_result OR status IN {ACTIVE})"
    (count,) = database.execute(query, (tenant,)).fetchone()
    return int(count)


def delete_oldest_without_result(database: sqlite3.Connection, tenant: str) -> None:
    """Of a tenant's jobs that have failed or were cancelled."""
    database.execute(
        """DELETE FROM objects WHERE seq = (
            SELECT MIN(seq) FROM fine_tuning_jobs WHERE tenant = ? AND status IN ('failed', 'cancelled'))""",
        (tenant,),
    )


def next_candidate(database: sqlite3.Connection, names: Sequence[str]) -> int | None:
    """The job to work on next, of those whose base model is called so."""
    row = database.execute(CANDIDATES, (orjson.dumps(list(names)).decode(),)).fetchone()
    return None if row is None else int(row[0])


def others_wait(database: sqlite3.Connection, seq: int, names: Sequence[str]) -> bool:
    """Whether a job of another tenant than that of `seq` is to be worked on."""
    (found,) = database.execute(OTHERS, (seq, orjson.dumps(list(names)).decode())).fetchone()
    return bool(found)


def end_turn(database: sqlite3.Connection, seq: int) -> None:
    """The job waits again, behind those of others."""
    database.execute("UPDATE fine_tuning_jobs SET status = 'queued', turn_ended = ? WHERE seq = ?", (time.time(), seq))
    insert_event(database, seq, "The job waits while jobs of others have their turn.")


def claim(database: sqlite3.Connection, seq: int, owner: str) -> JobRow | None:
    """Make `owner` the owner; None where nothing is to be done any more."""
    claimed = database.execute(
        f"UPDATE fine_tuning_jobs SET owner = ?, status = 'validating_files' WHERE seq = ? AND status IN {DUE}",
        (owner, seq),
    )
    return read_owned(database, seq, owner) if claimed.rowcount else None


def read_owned(database: sqlite3.Connection, seq: int, owner: str) -> JobRow:
    """Raises OwnerLostError."""
    row = database.execute(
        """SELECT id, objects.tenant, label, status, step, num_steps, body
        FROM fine_tuning_jobs JOIN objects USING (seq) WHERE seq = ? AND owner = ?""",
        (seq, owner),
    ).fetchone()
    if row is None:
        raise OwnerLostError
    job_id, tenant, label, status, step, num_steps, body = row
    return JobRow(seq, job_id, tenant, label, status, step, num_steps, orjson.loads(body))


def change_job(
    database: sqlite3.Connection, seq: int, status: JobStatus, changes: Mapping[str, Any] | None = None
) -> None:
    """Change the status, and fields of the body."""
    database.execute("UPDATE fine_tuning_jobs SET status = ? WHERE seq = ?", (status, seq))
    if changes:
        (body,) = database.execute("SELECT body FROM objects WHERE seq = ?", (seq,)).fetchone()
        database.execute(
            "UPDATE objects SET body = ? WHERE seq = ?", (orjson.dumps({**orjson.loads(body), **changes}), seq)
        )


def insert_event(
    database: sqlite3.Connection, seq: int, message: str, *, level: Level = "info", taken: StepLoss | None = None
) -> None:
    numbers = (None, None, None) if taken is None else (taken.step, taken.loss, taken.validation_loss)
    database.execute(
        """INSERT INTO fine_tuning_events (job, id, created, level, message, step, loss, validation_loss)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
        (seq, f"ftevent-{secrets.token_hex(12)}", int(time.time()), level, message, *numbers),
    )
    database.execute(
        """DELETE FROM fine_tuning_events WHERE job = :job AND number <= (
            SELECT number FROM fine_tuning_events WHERE job = :job ORDER BY number DESC LIMIT 1 OFFSET :kept)""",
        {"job": seq, "kept": MAX_EVENTS},
    )


def begin_steps(database: sqlite3.Connection, seq: int, step: int, num_steps: int) -> None:
    """The job goes on after `step`; what was said of later ones is said again."""
    database.execute("UPDATE fine_tuning_jobs SET step = ?, num_steps = ? WHERE seq = ?", (step, num_steps, seq))
    database.execute("DELETE FROM fine_tuning_events WHERE job = ? AND step > ?", (seq, step))


def save_steps(
    database: sqlite3.Connection, seq: int, num_new: int, num_tokens: int, step: int, finish: float | None
) -> None:
    """Where the job is, and when it may end; the server's totals count the new steps."""
    database.execute("UPDATE fine_tuning_jobs SET step = ?, finish = ? WHERE seq = ?", (step, finish, seq))
    database.execute("UPDATE fine_tuning_totals SET steps = steps + ?, tokens = tokens + ?", (num_new, num_tokens))


def save_checkpoint(database: sqlite3.Connection, seq: int, taken: StepLoss, num_kept: int) -> None:
    """The newest `num_kept` stay."""
    database.execute(
        "INSERT OR IGNORE INTO fine_tuning_checkpoints VALUES (?, ?, ?, ?, ?, ?)",
        (
            *(seq, taken.step, f"ftckpt_{secrets.token_hex(12)}", int(time.time())),
            *(taken.loss, taken.validation_loss),
        ),
    )
    database.execute(
        """DELETE FROM fine_tuning_checkpoints WHERE job = :job AND step NOT IN (
            SELECT step FROM fine_tuning_checkpoints WHERE job = :job ORDER BY step DESC LIMIT :kept)""",
        {"job": seq, "kept": num_kept},
    )


def end_job(database: sqlite3.Connection, table: ObjectTable, seq: int) -> None:
    """Without a result, or no longer with one: the job's files go, and it expires."""
    database.execute("UPDATE fine_tuning_jobs SET has_result = 0 WHERE seq = ?", (seq,))
    database.execute("DELETE FROM fine_tuning_checkpoints WHERE job = ?", (seq,))
    expires = table.expiry(time.time())
    database.execute("UPDATE objects SET size = LENGTH(body), expires = ? WHERE seq = ?", (expires, seq))


def save_size(database: sqlite3.Connection, seq: int, owner: str, num_bytes: int) -> None:
    """A job that has not ended counts with the bytes of its folder."""
    database.execute(
        f"""UPDATE objects SET size = LENGTH(body) + ? WHERE seq = (
            SELECT seq FROM fine_tuning_jobs WHERE seq = ? AND owner = ? AND status IN {ACTIVE})""",
        (num_bytes, seq, owner),
    )


def bytes_of_others(database: sqlite3.Connection, table: ObjectTable, row: JobRow) -> int:
    """Of the tenant's other jobs and results."""
    (own,) = database.execute("SELECT size FROM objects WHERE seq = ?", (row.seq,)).fetchone()
    return table.usage(database, row.tenant)[1] - int(own)


def keep_result(database: sqlite3.Connection, seq: int, num_bytes: int) -> None:
    """A job that has succeeded stays until its result is deleted, and counts with the bytes of it."""
    database.execute("UPDATE fine_tuning_jobs SET has_result = 1 WHERE seq = ?", (seq,))
    database.execute("UPDATE objects SET size = LENGTH(body) + ? WHERE seq = ?", (num_bytes, seq))


def progress(database: sqlite3.Connection, seq: int) -> tuple[JobStatus, int, int, float | None]:
    """Status, step, number of steps, estimated end."""
    query = "SELECT status, step, num_steps, finish FROM fine_tuning_jobs WHERE seq = ?"
    status, step, num_steps, finish = database.execute(query, (seq,)).fetchone()
    return status, step, num_steps, finish


def events_of(database: sqlite3.Connection, seq: int) -> list[tuple[Any, ...]]:
    """id, created, level, message, step, loss, validation loss of each, the oldest first."""
    return database.execute(
        """SELECT id, created, level, message, step, loss, validation_loss FROM fine_tuning_events
        WHERE job = ? ORDER BY number""",
        (seq,),
    ).fetchall()


def checkpoints_of(database: sqlite3.Connection, seq: int) -> list[tuple[Any, ...]]:
    """id, created, step, loss, validation loss of each, the oldest first."""
    return database.execute(
        """SELECT id, created, step, loss, validation_loss FROM fine_tuning_checkpoints
        WHERE job = ? ORDER BY step""",
        (seq,),
    ).fetchall()


def job_summaries(database: sqlite3.Connection, tenant: str) -> list[dict[str, Any]]:
    """A tenant's newest jobs with their losses, thinned out up to the last."""
    found = []
    for seq, job_id, base, status, step, num_steps in database.execute(
        """SELECT seq, id, base, status, step, num_steps FROM fine_tuning_jobs JOIN objects USING (seq)
        WHERE fine_tuning_jobs.tenant = ? ORDER BY seq DESC LIMIT ?""",
        (tenant, MAX_SUMMARIES),
    ).fetchall():
        rows = database.execute(
            """SELECT step, loss, validation_loss FROM fine_tuning_events
            WHERE job = ? AND step IS NOT NULL ORDER BY number""",
            (seq,),
        ).fetchall()
        losses = [(at, loss) for at, loss, _ in rows]
        every = -(-len(losses) // MAX_POINTS) or 1
        found.append(
            {
                "id": job_id,
                "model": base,
                "status": status,
                "step": step,
                "num_steps": num_steps,
                "losses": losses[::-1][::every][::-1],
                "validation_loss": next((held_out for *_, held_out in reversed(rows) if held_out is not None), None),
            }
        )
    return found


@dataclass(frozen=True, slots=True)
class JobCounts:
    """For metrics: jobs by status, and the totals of all times."""

    by_status: Mapping[str, int]
    steps: int
    tokens: int


def count_jobs(database: sqlite3.Connection) -> JobCounts:
    by_status = dict(database.execute("SELECT status, COUNT(*) FROM fine_tuning_jobs GROUP BY status").fetchall())
    steps, tokens = database.execute("SELECT steps, tokens FROM fine_tuning_totals").fetchone()
    return JobCounts(by_status, steps, tokens)
