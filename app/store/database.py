"""The SQLite database of a data folder, used from threads of its own and by several processes at a time."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tessera.app.store.schema import Schema, migrate

T = TypeVar("T")

LOCK_TIMEOUT = 20.0  # seconds; other processes hold the write lock for milliseconds
MAX_JOURNAL = 64 * 2**20  # bytes that the write-ahead log keeps after a checkpoint
SPARE_PAGES = 10_000  # unused ones that the file keeps
VACUUM_PAGES = 5000  # given back to the file system at a time
FILE_PRAGMAS = ("PRAGMA auto_vacuum = INCREMENTAL", "PRAGMA journal_mode = WAL")  # before the first table
PRAGMAS = (
    # A commit survives kill -9; a power cut may undo the last ones, but damages nothing.
    "PRAGMA synchronous = NORMAL",
    "PRAGMA foreign_keys = ON",
    f"PRAGMA journal_size_limit = {MAX_JOURNAL}",
)


class Database:
    """A connection per thread. Methods block, and raise sqlite3.Error, OSError or StoreUnavailableError."""

    def __init__(self, path: Path, schemas: Sequence[Schema]) -> None:
        """Open or create the file, and bring its tables up to date. One process at a time does so."""
        self._path = path
        self._local = threading.local()
        self._open: list[sqlite3.Connection] = []
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            for pragma in FILE_PRAGMAS:
                self._connection().execute(pragma)
            migrate(self._connection(), schemas)
        except BaseException:
            self.close()
            raise

    def query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `query`, all of whose statements see the same state."""
        database = self._connection()
        database.execute("BEGIN")
        try:
            return query(database)
        finally:
            if database.in_transaction:
                database.execute("ROLLBACK")

    def transact(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `change`, whose statements take effect together, or, where it raises, not at all."""
        database = self._connection()
        database.execute("BEGIN IMMEDIATE")
        try:
            result = change(database)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return result

    def give_back_space(self) -> None:
        """Shorten the file where much of it is no longer used."""
        database = self._connection()
        (num_unused,) = database.execute("PRAGMA freelist_count").fetchone()
        if num_unused > SPARE_PAGES:
            # Not execute, which ends after the first page.
            database.executescript(f"PRAGMA incremental_vacuum({min(num_unused - SPARE_PAGES, VACUUM_PAGES)})")

    def close(self) -> None:
        """Once no thread uses it any more."""
        for connection in self._open:
            connection.close()

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                self._path, timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
            )
            try:
                for pragma in PRAGMAS:
                    connection.execute(pragma)
            except BaseException:
                connection.close()
                raise
            self._local.connection = connection
            self._open.append(connection)
        return connection
