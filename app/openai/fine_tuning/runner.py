"""Finds jobs that no process works on, and works on them, one at a time of all that share a data folder.

The process that does has the lock TURN, which the kernel frees when it ends, however it ends: the other app processes,
or the server after a restart, go on then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import Request
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessera.app.openai.due import wait_until_due
from tessera.app.openai.fine_tuning.job_run import JobRun
from tessera.app.openai.fine_tuning.jobs import FOLDER, FineTuningJobs, remove_unknown_folders
from tessera.app.openai.fine_tuning.results import JobResults
from tessera.app.openai.fine_tuning.tables import JobCounts, OwnerLostError, count_jobs, job_summaries, next_candidate
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.locks import ProcessLocks

logger = logging.getLogger("tessera.app")

TURN = 2**40  # number of the lock, above those of batches
LOOK_INTERVAL = 1.0  # seconds
RETRY_DELAY = 5.0
SWEEP_INTERVAL = 3600.0


class JobRunner:
    """Of one app process; it does nothing where fine-tuning is off. Also the metrics of all jobs."""

    def __init__(self, jobs: FineTuningJobs, results: JobResults) -> None:
        self._jobs = jobs
        self._results = results
        self._store = jobs.store
        self._owner = secrets.token_hex(16)
        self._due = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._run: JobRun | None = None
        self._counts = JobCounts({}, 0, 0)
        self._swept_at = float("-inf")

    def start(self) -> None:
        """Look for jobs from now on, in the running event loop."""
        if self._jobs.settings.enable_fine_tuning:
            self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    def look_now(self) -> None:
        """There is a new job, or one was changed."""
        self._due.set()
        if self._run is not None:
            self._run.look_now()

    async def close(self) -> None:
        """Stop, the job's process too; the job goes on elsewhere or later, from its last checkpoint."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def status(self, tenant: str) -> list[dict[str, Any]] | None:
        """For the page: a tenant's newest jobs; None where there is no fine-tuning, or the store cannot be read."""
        if not self._jobs.settings.enable_fine_tuning:
            return None
        try:
            return await self._store.query(partial(job_summaries, tenant=tenant))
        except (StoreUnavailableError, StoreFullError):
            return None

    def collect(self, prefix: str) -> Iterator[Metric]:
        if not self._jobs.settings.enable_fine_tuning:
            return
        counts = self._counts
        jobs = GaugeMetricFamily(f"{prefix}:fine_tuning_jobs", "Fine-tuning jobs by status.", labels=["status"])
        for status, count in counts.by_status.items():
            jobs.add_metric([status], count)
        yield jobs
        yield CounterMetricFamily(f"{prefix}:fine_tuning_steps", "Steps of fine-tuning jobs.", counts.steps)
        yield CounterMetricFamily(
            f"{prefix}:fine_tuning_tokens", "Tokens that fine-tuning jobs have learnt.", counts.tokens
        )

    async def _look_for_ever(self) -> None:
        if self._store.is_temporary:  # it is empty
            await self._due.wait()
        while True:
            self._due.clear()
            try:
                await self._look()
            except OwnerLostError:
                logger.info("a fine-tuning job was deleted or taken over")
            except (StoreUnavailableError, StoreFullError):
                await asyncio.sleep(RETRY_DELAY)
            except Exception:
                logger.exception("a fine-tuning job was interrupted; it is tried again")
                await asyncio.sleep(RETRY_DELAY)
            await wait_until_due(self._due, LOOK_INTERVAL)

    async def _look(self) -> None:
        self._counts = await self._store.query(count_jobs)
        if time.monotonic() - self._swept_at > SWEEP_INTERVAL:
            self._swept_at = time.monotonic()
            await self._sweep()
        seq = await self._store.query(partial(next_candidate, names=self._jobs.base_names))
        if seq is None or not await self._store.with_locks(_try_turn):
            return
        try:
            # Another process may have taken it between the two.
            seq = await self._store.query(partial(next_candidate, names=self._jobs.base_names))
            if seq is not None:
                await self._work(seq)
        finally:
            with contextlib.suppress(StoreUnavailableError, StoreFullError):
                await self._store.with_locks(lambda locks: locks.unlock(TURN))

    async def _work(self, seq: int) -> None:
        self._run = JobRun(self._jobs, self._results, seq, self._owner)
        working = asyncio.ensure_future(self._run.run())
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=LOOK_INTERVAL)
                with contextlib.suppress(StoreUnavailableError, StoreFullError):
                    self._counts = await self._store.query(count_jobs)
            working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            self._run = None

    async def _sweep(self) -> None:
        """Remove the folders of jobs that are gone."""
        known = await self._store.query(_known_jobs)
        before = time.time() - SWEEP_INTERVAL
        await self._store.with_folder(FOLDER, lambda folder: remove_unknown_folders(folder, known, before))


def _known_jobs(database: sqlite3.Connection) -> set[str]:
    rows = database.execute("SELECT id FROM fine_tuning_jobs JOIN objects USING (seq)")
    return {job_id for (job_id,) in rows}


def _try_turn(locks: ProcessLocks) -> bool:
    return locks.try_lock(TURN)


def runner_of(request: Request) -> JobRunner:
    runner: Any = request.app.state.fine_tuning_runner
    assert isinstance(runner, JobRunner)
    return runner
