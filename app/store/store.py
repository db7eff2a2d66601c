"""The store of one app process: database and contents of files, used from the event loop without blocking it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request

from tessera.app.store.contents import Contents
from tessera.app.store.database import Database
from tessera.app.store.errors import StoreFullError, StoreUnavailableError, store_errors
from tessera.app.store.locks import ProcessLocks
from tessera.app.store.objects import OBJECTS, delete_expired
from tessera.app.store.schema import Schema

logger = logging.getLogger("tessera.app")

T = TypeVar("T")

DATABASE_FILE, LOCK_FILE, CONTENTS_FOLDER = "store.sqlite", "locks", "files"
MIGRATION_LOCK = 0  # batches have the numbers from 1
NUM_READERS, NUM_FILERS = 2, 4  # threads; syncing a file may take long
CLEANING_INTERVAL = 60.0  # seconds
SWEEP_INTERVAL = 3600.0


class Store:
    """Opened at the first use, and again at the next one where that failed.

    All methods raise StoreUnavailableError or StoreFullError for what the disk refuses, and nothing else is disturbed.
    Changes run in one thread, one after the other, and reads in others beside it.

    Attributes:
        is_temporary: whether it goes with this object.

    Args:
        folder: the data folder; None makes a temporary one.
        schemas: tables of the rooms that use it.
    """

    def __init__(self, folder: Path | None, schemas: Sequence[Schema] = ()) -> None:
        self._folder = folder
        self.is_temporary = folder is None
        self._schemas = (OBJECTS, *schemas)
        self._opening = threading.Lock()
        self._parts: tuple[Database, Contents, ProcessLocks] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="store-reader")
        self._filers = ThreadPoolExecutor(NUM_FILERS, thread_name_prefix="store-files")
        self._cleaning: asyncio.Task[None] | None = None
        self._release: Callable[[], Any] = lambda: None

    async def query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `query`, run in a thread, which reads one state of the database."""
        return await self._run(self._readers, lambda: self._open()[0].query(query))

    async def transact(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `change`, run in a thread: all of its statements take effect, or, where it raises, none.

        Once begun it is carried through, even when the caller is cancelled.
        """
        return await self._run(self._writer, lambda: self._open()[0].transact(change))

    async def with_contents(self, work: Callable[[Contents], T]) -> T:
        """The result of `work` on the contents of files, run in a thread."""
        return await self._run(self._filers, lambda: work(self._open()[1]))

    async def with_folder(self, name: str, work: Callable[[Path], T]) -> T:
        """The result of `work` on a folder of the data folder, run in a thread; it is made where there is none."""

        def open_folder() -> T:
            self._open()
            assert self._folder is not None
            folder = self._folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            return work(folder)

        return await self._run(self._filers, open_folder)

    async def with_locks(self, work: Callable[[ProcessLocks], T]) -> T:
        """The result of `work` on the locks among processes, run in a thread."""
        return await self._run(self._readers, lambda: work(self._open()[2]))

    def start(self) -> None:
        """Remove now and then what is expired, from the running event loop."""
        self._cleaning = asyncio.get_running_loop().create_task(self._clean_for_ever())

    async def close(self) -> None:
        """Finish what is under way."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
        await asyncio.to_thread(self._close)

    async def clean(self, *, sweep: bool = False) -> None:
        """Delete expired objects and the contents of deleted ones; `sweep` also what a crash has left."""
        await self.transact(delete_expired)
        removed = await self.query(lambda database: database.execute("SELECT id FROM removed_contents").fetchall())
        if removed:
            await self.with_contents(lambda contents: contents.remove(*(content_id for (content_id,) in removed)))
            await self.transact(
                lambda database: database.executemany("DELETE FROM removed_contents WHERE id = ?", removed)
            )
        if sweep:
            await self._run(self._filers, self._sweep)
        await self._run(self._writer, lambda: self._open()[0].give_back_space())

    async def _clean_for_ever(self) -> None:
        swept_at = float("-inf")
        if self.is_temporary:  # it is empty
            await asyncio.sleep(CLEANING_INTERVAL)
        while True:
            due = time.monotonic() - swept_at > SWEEP_INTERVAL
            try:
                await self.clean(sweep=due)
                swept_at = time.monotonic() if due else swept_at
            except (StoreUnavailableError, StoreFullError):
                logger.warning("what is expired in the data folder cannot be removed just now")
            except Exception:
                logger.exception("what is expired in the data folder could not be removed")
            await asyncio.sleep(CLEANING_INTERVAL)

    def _sweep(self) -> None:
        database, contents, _ = self._open()

        def unknown(content_ids: list[str]) -> list[str]:
            def find(connection: sqlite3.Connection) -> list[str]:
                known = "SELECT 1 FROM objects WHERE id = ? AND has_content"
                return [each for each in content_ids if connection.execute(known, (each,)).fetchone() is None]

            return database.query(find)

        contents.sweep(unknown)

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            future = asyncio.get_running_loop().run_in_executor(threads, partial(_guarded, work))
        except RuntimeError:  # the threads have ended
            raise StoreUnavailableError("The server is shutting down.") from None
        return await asyncio.shield(future)

    def _open(self) -> tuple[Database, Contents, ProcessLocks]:
        with self._opening:
            if self._parts is None:
                if self._folder is None:
                    self._folder = Path(tempfile.mkdtemp(prefix="tessera-data-"))
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                locks = ProcessLocks(self._folder / LOCK_FILE)
                try:
                    locks.wait_for(MIGRATION_LOCK)
                    contents = Contents(self._folder / CONTENTS_FOLDER)
                    database = Database(self._folder / DATABASE_FILE, self._schemas)
                    locks.unlock(MIGRATION_LOCK)
                except BaseException:
                    locks.close()
                    raise
                self._parts = database, contents, locks
                temporary = self._folder if self.is_temporary else None
                self._release = weakref.finalize(self, _release, database, locks, temporary)
            return self._parts

    def _close(self) -> None:
        for threads in (self._writer, self._readers, self._filers):
            threads.shutdown(cancel_futures=True)
        self._release()
        self._parts = None


def store_of(request: Request) -> Store:
    store: Any = request.app.state.store
    assert isinstance(store, Store)
    return store


def _release(database: Database, locks: ProcessLocks, temporary: Path | None) -> None:
    database.close()
    locks.close()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _guarded(work: Callable[[], T]) -> T:
    with store_errors():
        return work()
