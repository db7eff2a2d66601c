"""One batch from its validation to its files, by the process that owns it. It can end anywhere and be begun again."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from tessera.app.openai.batches.batches import Batches
from tessera.app.openai.batches.execution import LineExecutor, SuspectLineError
from tessera.app.openai.batches.input_file import InputLine, LineReader, validate_file
from tessera.app.openai.batches.output_files import OutputFiles
from tessera.app.openai.batches.tables import (
    BatchRow,
    LineResult,
    Status,
    change_status,
    claim,
    finish,
    lines_done,
    read_owned,
    save_results,
)
from tessera.app.store.errors import StoreFullError, StoreUnavailableError

logger = logging.getLogger("tessera.app")

SAVE_INTERVAL = 0.2  # seconds between two transactions with results
LOOK_INTERVAL = 1.0  # seconds between two looks whether the batch is cancelled
MAX_UNSAVED, MAX_UNSAVED_BYTES = 2048, 2**25  # results in hand; beyond it lines wait
SAVE_RETRY_DELAY = 2.0  # seconds; the disk is full, say


class BatchRun:
    """Works on the batch `seq`, whose lock this process has.

    Attributes:
        is_leaving: it begins no more lines, and ends without the batch's end: another run goes on with it.

    Args:
        slots: one for each line that may run at a time, of all batches.
        num_slots: how many there are.
    """

    def __init__(
        self,
        batches: Batches,
        executor: LineExecutor,
        seq: int,
        owner: str,
        slots: asyncio.Semaphore,
        num_slots: int,
    ) -> None:
        self.is_leaving = False
        self._batches = batches
        self._store = batches.store
        self._executor = executor
        self._seq = seq
        self._owner = owner
        self._slots = slots
        self._num_slots = num_slots
        self._unsaved: list[LineResult] = []
        self._unsaved_bytes = 0
        self._saved = asyncio.Event()
        self._lines: deque[InputLine] = deque()
        self._suspects: list[InputLine] = []
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        """Raises OwnerLostError, and StoreUnavailableError or StoreFullError where it must be tried again."""
        claimed = await self._store.transact(partial(claim, seq=self._seq, owner=self._owner))
        if claimed is None:
            return
        row = claimed
        path = await self._store.with_contents(lambda contents: contents.path(claimed.id))
        if not await asyncio.to_thread(path.is_file):
            await self._fail([_error("file_not_found", "The input file is lost.")], although_cancelled=True)
            return
        if row.status == "validating" and time.time() < row.deadline:
            row = await self._validate(row, path)
        if row.status == "in_progress" and time.time() < row.deadline:
            await self._run_lines(row, path)
            if self.is_leaving:
                return
        if row.status != "failed":
            await self._finish(path)

    async def _validate(self, row: BatchRow, path: Path) -> BatchRow:
        settings = self._batches.settings
        endpoint = row.body["endpoint"]
        found = await asyncio.to_thread(
            validate_file,
            path,
            endpoint,
            (*settings.served_model_names, *self._executor.adapter_names)
            if endpoint != "/v1/embeddings"
            else self._batches.models.split("\n"),
            max_lines=settings.max_batch_lines,
            max_line=settings.max_body_bytes,
        )
        if found.errors:
            return await self._fail(found.errors)
        changes = {"in_progress_at": int(time.time()), "total": found.num_requests, "model": found.model}
        return await self._change("in_progress", changes)

    async def _fail(self, errors: list[dict[str, Any]], *, although_cancelled: bool = False) -> BatchRow:
        """The failed batch, or the cancelled one as it is."""
        changes = {"failed_at": int(time.time()), "errors": {"object": "list", "data": errors}}

        def fail(database: sqlite3.Connection) -> BatchRow:
            if although_cancelled or read_owned(database, self._seq, self._owner).status != "cancelling":
                expires = self._batches.table.expiry(time.time())
                finish(database, self._seq, self._owner, "failed", changes, expires)
            return read_owned(database, self._seq, self._owner)

        return await self._store.transact(fail)

    async def _change(self, status: Status, changes: dict[str, Any]) -> BatchRow:
        """The next status, unless the batch has been cancelled."""

        def change(database: sqlite3.Connection) -> BatchRow:
            if read_owned(database, self._seq, self._owner).status != "cancelling":
                change_status(database, self._seq, status, changes)
            return read_owned(database, self._seq, self._owner)

        return await self._store.transact(change)

    async def _run_lines(self, row: BatchRow, path: Path) -> None:
        """Run the lines without a result, until all have one, or the batch is cancelled or over."""
        done = await self._store.query(partial(lines_done, seq=self._seq))
        num_left = row.body["total"] - len(done)
        if num_left <= 0:
            return
        reader = LineReader(path, self._batches.settings.max_body_bytes, done)
        run_line = partial(self._executor.run, endpoint=row.body["endpoint"], tenant=row.tenant, slots=self._slots)

        async def work() -> None:
            while line := await self._next_line(reader):
                try:
                    self._collect(await run_line(line))
                except SuspectLineError:
                    self._suspects.append(line)
                while len(self._unsaved) >= MAX_UNSAVED or self._unsaved_bytes >= MAX_UNSAVED_BYTES:
                    self._saved.clear()
                    await self._saved.wait()

        async def work_through() -> None:
            workers = [asyncio.ensure_future(work()) for _ in range(min(self._num_slots, num_left))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            for line in self._suspects:
                self._collect(await run_line(line, is_alone=True))

        working = asyncio.ensure_future(work_through())
        try:
            await self._save_while(working, row.deadline)
            if working.done():
                working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            reader.close()
            await asyncio.shield(self._save())

    def _collect(self, result: LineResult) -> None:
        self._unsaved.append(result)
        self._unsaved_bytes += len(result.data)

    async def _next_line(self, reader: LineReader) -> InputLine | None:
        if not self._lines:
            async with self._reading:
                if not self._lines:
                    self._lines.extend(await asyncio.to_thread(reader.read_block))
        return self._lines.popleft() if self._lines and not self.is_leaving else None

    async def _save_while(self, working: asyncio.Future[None], deadline: float) -> None:
        """Store results as they come, until all are stored or the batch is cancelled or over."""
        looked_at, is_told = time.monotonic(), False
        while (self._unsaved or not working.done()) and time.time() < deadline:
            await asyncio.wait({working}, timeout=SAVE_INTERVAL)
            if not self._unsaved and time.monotonic() - looked_at < LOOK_INTERVAL:
                continue
            looked_at = time.monotonic()
            try:
                status = await self._save()
            except (StoreFullError, StoreUnavailableError) as error:
                if not is_told:
                    logger.warning("results of a batch wait in hand: %s", error)
                is_told = True
                await asyncio.sleep(SAVE_RETRY_DELAY)
                row = await self._store.query(partial(read_owned, seq=self._seq, owner=self._owner))
                status = row.status
            if status != "in_progress":
                return

    async def _save(self) -> Status:
        results = self._unsaved[:]

        def save(database: sqlite3.Connection) -> Status:
            status = save_results(database, self._seq, self._owner, results)
            if results:
                self._batches.check_results(database, read_owned(database, self._seq, self._owner).tenant)
            return status

        status = await self._store.transact(save)
        del self._unsaved[: len(results)]
        self._unsaved_bytes -= sum(len(result.data) for result in results)
        self._saved.set()
        return status

    async def _finish(self, path: Path) -> None:
        """Write the files of results and end the batch."""

        def begin(database: sqlite3.Connection) -> tuple[BatchRow, Status]:
            row = read_owned(database, self._seq, self._owner)
            if row.status == "cancelling":
                return row, "cancelled"
            if row.status == "finalizing":
                return row, row.body["outcome"]
            num_done = len(lines_done(database, self._seq))
            outcome: Status = "completed" if num_done == row.body.get("total") else "expired"
            changes = {"finalizing_at": int(time.time()), "outcome": outcome}
            change_status(database, self._seq, "finalizing", changes)
            return read_owned(database, self._seq, self._owner), outcome

        row, outcome = await self._store.transact(begin)
        files = OutputFiles(self._store, row)
        try:
            if "total" in row.body:
                await files.write(path, outcome, self._batches.settings.max_body_bytes)
            published = await files.publish()
            await self._end(row, outcome, {f"{outcome}_at": int(time.time())}, published)
        finally:
            files.discard()

    async def _end(
        self, row: BatchRow, status: Status, changes: dict[str, Any], published: list[tuple[str, str, str, int]]
    ) -> None:
        """The last transaction, with the published files, as `OutputFiles.publish` gives them."""

        def end(database: sqlite3.Connection) -> None:
            for field, file_id, filename, num_bytes in published:
                self._batches.files.insert(
                    database,
                    row.tenant,
                    file_id,
                    filename,
                    "batch_output",
                    num_bytes,
                    lifetime=row.body.get("output_lifetime"),
                    is_bounded=False,
                )
                changes[field] = file_id
            expires = self._batches.table.expiry(time.time())
            finish(database, self._seq, self._owner, status, changes, expires)

        try:
            await self._store.transact(end)
        except StoreFullError:  # they are not to fill the disk further
            await self._store.with_contents(lambda contents: contents.remove(*(each[1] for each in published)))
            raise
        logger.info("batch %s: %s", row.id, status)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
