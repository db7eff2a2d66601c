"""Finds batches that no process works on, and works on them.

A batch belongs to the process that holds its lock, which the kernel frees when that process ends, however it ends. The
other app processes, or the server after a restart, look for such batches every LOOK_INTERVAL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from tessera.app.generate.served_models import ServedModels
from tessera.app.openai.batches.batches import Batches
from tessera.app.openai.batches.execution import LineExecutor
from tessera.app.openai.batches.run import BatchRun
from tessera.app.openai.batches.tables import Candidate, OwnerLostError, candidates
from tessera.app.openai.due import wait_until_due
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.locks import ProcessLocks

logger = logging.getLogger("tessera.app")

LOOK_INTERVAL = 1.0  # seconds
RETRY_DELAY = 5.0  # seconds; a batch that the store stopped is left alone for so long
MAX_RUNNING = 4  # batches of one process at a time
TURN = 60.0  # seconds for which a batch keeps its place, where a key without one waits
LEAVE_PATIENCE = 600.0  # seconds for the lines under way of a batch that gives up its place; then they run again later
MAX_LOOKED_AT = 1024
UNKNOWN_SEQS = 64  # of a model that has not been loaded yet


@dataclass
class RunningBatch:
    """Attributes:
    begun: `time.monotonic()` of its turn's beginning.
    """

    tenant: str
    run: BatchRun
    task: asyncio.Future[None]
    begun: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        """Give up its place, now or after its lines under way."""
        self.run.is_leaving = True
        asyncio.get_running_loop().call_later(LEAVE_PATIENCE, self.task.cancel)


class BatchRunner:
    """Of one app process."""

    def __init__(self, app: FastAPI, models: ServedModels, batches: Batches) -> None:
        self._models = models
        self._batches = batches
        self._store = batches.store
        self._executor = LineExecutor(app, models)
        self._owner = secrets.token_hex(16)
        self._running: dict[int, RunningBatch] = {}
        self._left_at: dict[int, float] = {}  # of the batches that wait for their next turn
        self._passed_over: set[int] = set()  # in the last look, so that a process without a batch could take them
        self._due = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for batches from now on, in the running event loop."""
        self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    def look_now(self) -> None:
        """There is a new batch, or one has been cancelled."""
        self._due.set()

    async def close(self) -> None:
        """Stop, with the results so far stored; the batches go on elsewhere or later."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        if self._store.is_temporary:  # it is empty
            await self._due.wait()
        slots: asyncio.Semaphore | None = None
        while True:
            self._due.clear()
            if slots is None and self._can_run:
                num_slots = self._num_slots()
                slots = asyncio.Semaphore(num_slots)
            if slots is not None:
                try:
                    await self._take_one(slots, num_slots)
                except (StoreUnavailableError, StoreFullError):
                    await asyncio.sleep(RETRY_DELAY)
                except Exception:
                    logger.exception("batches could not be looked for")
                    await asyncio.sleep(RETRY_DELAY)
            await wait_until_due(self._due, LOOK_INTERVAL)

    async def _take_one(self, slots: asyncio.Semaphore, num_slots: int) -> None:
        """Begin to work on one batch more, if no process with fewer has taken it since the last look.

        Those of the keys with the fewest places come first, and of them those that have waited for the longest time.
        """
        found = await self._store.query(partial(candidates, models=self._batches.models, limit=MAX_LOOKED_AT))
        self._left_at = {each.seq: self._left_at[each.seq] for each in found if each.seq in self._left_at}
        waiting = sorted(
            (each for each in found if each.seq not in self._running),
            key=lambda each: (self._num_running(each.tenant), self._left_at.get(each.seq, 0.0)),
        )
        if len(self._running) >= MAX_RUNNING:
            await self._make_place(waiting)
            return
        passed_over, self._passed_over = self._passed_over, set()
        for seq, tenant in waiting:
            if self._running and seq not in passed_over:
                self._passed_over.add(seq)
            elif await self._store.with_locks(partial(_try_lock, seq)):
                run = BatchRun(self._batches, self._executor, seq, self._owner, slots, num_slots)
                self._running[seq] = RunningBatch(tenant, run, asyncio.ensure_future(self._work(seq, run)))
                return

    async def _make_place(self, waiting: Sequence[Candidate]) -> None:
        """Have a batch of the key with the most places leave, for a key with fewer: no key waits for all of another."""
        if any(running.run.is_leaving for running in self._running.values()):
            return
        for seq, tenant in waiting:
            if not await self._store.with_locks(partial(_is_free, seq)):  # another process works on it
                continue
            longest = min(self._running.values(), key=lambda each: (-self._num_running(each.tenant), each.begun))
            num_more = self._num_running(longest.tenant) - self._num_running(tenant)
            if num_more > 1 or (num_more == 1 and time.monotonic() - longest.begun > TURN):
                longest.leave()
            return

    def _num_running(self, tenant: str) -> int:
        return sum(running.tenant == tenant for running in self._running.values())

    async def _work(self, seq: int, run: BatchRun) -> None:
        try:
            await run.run()
        except OwnerLostError:
            logger.info("a batch was deleted or taken over")
        except (StoreUnavailableError, StoreFullError):
            await asyncio.sleep(RETRY_DELAY)
        except Exception:
            logger.exception("a batch was interrupted; it is tried again")
            await asyncio.sleep(RETRY_DELAY)
        finally:
            with contextlib.suppress(StoreUnavailableError, StoreFullError):
                await self._store.with_locks(lambda locks: locks.unlock(seq))
            del self._running[seq]
            if run.is_leaving:
                self._left_at[seq] = time.monotonic()
            self._due.set()

    @property
    def _can_run(self) -> bool:
        """An engine is there, or comes on demand."""
        return any(model.client.info is not None or not model.engine.is_resident for model in self._models)

    def _num_slots(self) -> int:
        settings = self._models.default.settings
        most = (
            model.client.info.max_num_seqs * model.settings.data_parallel_size
            for model in self._models
            if model.client.info is not None
        )
        total = settings.batch_concurrency or max(1, max(most, default=UNKNOWN_SEQS) // 2)
        return math.ceil(total / settings.num_app_processes)


def _try_lock(seq: int, locks: ProcessLocks) -> bool:
    return locks.try_lock(seq)


def _is_free(seq: int, locks: ProcessLocks) -> bool:
    found = locks.try_lock(seq)
    if found:
        locks.unlock(seq)
    return found


def runner_of(request: Request) -> BatchRunner:
    runner: Any = request.app.state.batch_runner
    assert isinstance(runner, BatchRunner)
    return runner
