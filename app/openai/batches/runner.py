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
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from tessera.app.generate.served_models import ServedModels
from tessera.app.openai.batches.batches import Batches
from tessera.app.openai.batches.execution import LineExecutor
from tessera.app.openai.batches.run import BatchRun
from tessera.app.openai.batches.tables import OwnerLostError, candidates
from tessera.app.openai.due import wait_until_due
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.locks import ProcessLocks

logger = logging.getLogger("tessera.app")

LOOK_INTERVAL = 1.0  # seconds
RETRY_DELAY = 5.0  # seconds; a batch that the store stopped is left alone for so long
MAX_RUNNING = 4  # batches of one process at a time
MAX_LOOKED_AT = 64
UNKNOWN_SEQS = 64  # of a model that has not been loaded yet


class BatchRunner:
    """Of one app process."""

    def __init__(self, app: FastAPI, models: ServedModels, batches: Batches) -> None:
        self._models = models
        self._batches = batches
        self._store = batches.store
        self._executor = LineExecutor(app, models)
        self._owner = secrets.token_hex(16)
        self._running: dict[int, asyncio.Task[None]] = {}
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
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look_for_ever(self) -> None:
        if self._store.is_temporary:  # it is empty
            await self._due.wait()
        slots: asyncio.Semaphore | None = None
        while True:
            self._due.clear()
            if slots is None and self._can_run:
                num_slots = self._num_slots()
                slots = asyncio.Semaphore(num_slots)
            if slots is not None and len(self._running) < MAX_RUNNING:
                try:
                    await self._take_one(slots, num_slots)
                except (StoreUnavailableError, StoreFullError):
                    await asyncio.sleep(RETRY_DELAY)
                except Exception:
                    logger.exception("batches could not be looked for")
                    await asyncio.sleep(RETRY_DELAY)
            await wait_until_due(self._due, LOOK_INTERVAL)

    async def _take_one(self, slots: asyncio.Semaphore, num_slots: int) -> None:
        """Begin to work on one batch more, if no process with fewer has taken it since the last look."""
        found = await self._store.query(partial(candidates, models=self._batches.models, limit=MAX_LOOKED_AT))
        passed_over, self._passed_over = self._passed_over, set()
        for seq in found:
            if seq in self._running:
                continue
            if self._running and seq not in passed_over:
                self._passed_over.add(seq)
            elif await self._store.with_locks(partial(_try_lock, seq)):
                run = BatchRun(self._batches, self._executor, seq, self._owner, slots, num_slots)
                self._running[seq] = asyncio.ensure_future(self._work(seq, run))
                return

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


def runner_of(request: Request) -> BatchRunner:
    runner: Any = request.app.state.batch_runner
    assert isinstance(runner, BatchRunner)
    return runner
