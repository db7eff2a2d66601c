"""A client process: takes jobs from the common list until none is left, then returns its records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec

from tessera.loadtest.client.load_client import LoadClient, Target
from tessera.loadtest.client.records import Columns, Recorder
from tessera.loadtest.workload.jobs import JobFile

PROGRESS_INTERVAL = 0.2  # seconds
MAX_CONNECTED_AHEAD = 1024


class Plan(msgspec.Struct):
    """The task of a client process.

    Attributes:
        jobs, offsets: file and places of all jobs.
        arrivals: seconds after the start at which each job is due.
        slots: most jobs of this process under way; None: no bound.
        max_seconds: no job is begun later than so many seconds after the start; None: no bound.
    """

    target: Target
    jobs: str
    offsets: list[int]
    arrivals: list[float]
    slots: int | None
    max_seconds: float | None = None


class Start(msgspec.Struct):
    """Starts the run at `time.perf_counter()` = `at`. Any other message, or the end of the pipe, stops it."""

    at: float


class Progress(msgspec.Struct, tag=True):
    """Requests done and failed and tokens received so far, and jobs under way."""

    done: int
    failed: int
    output_tokens: int
    running: int


class Result(msgspec.Struct, tag=True):
    """The records; `cpu_share` is processor time over the time from start to end."""

    records: Columns
    cpu_share: float


Report = Progress | Result


class Counter(Protocol):
    """A number that all client processes share, as `multiprocessing.Value` gives it."""

    value: int

    def get_lock(self) -> Any: ...


def main(pipe: Connection, counter: Counter) -> None:
    """Entry of the process. It ignores Ctrl-C: the parent handles it and asks this one to stop."""
    plan = msgspec.msgpack.decode(pipe.recv_bytes(), type=Plan)
    jobs = JobFile(plan.jobs, plan.offsets)
    result = _run(_ClientProcess(plan, jobs, counter, pipe).run())
    if result is not None:
        pipe.send_bytes(msgspec.msgpack.encode(result))


def _run(work: Coroutine[Any, Any, Result | None]) -> Result | None:
    try:
        import uvloop
    except ImportError:  # not available on every system
        return asyncio.run(work)
    return uvloop.run(work)


class _ClientProcess:
    def __init__(self, plan: Plan, jobs: JobFile, counter: Counter, pipe: Connection) -> None:
        self._plan = plan
        self._jobs = jobs
        self._counter = counter
        self._pipe = pipe
        self._recorder = Recorder()
        self._client = LoadClient(plan.target, self._recorder)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> Result | None:
        """-> the records, or None if the run was never started."""
        loop = asyncio.get_running_loop()
        await self._client.connect(min(self._plan.slots or 0, MAX_CONNECTED_AHEAD))
        gc.collect()
        gc.freeze()
        self._pipe.send_bytes(b"ready")
        try:
            start = msgspec.msgpack.decode(await asyncio.to_thread(self._pipe.recv_bytes), type=Start).at
        except (EOFError, msgspec.DecodeError):
            return None
        work = asyncio.ensure_future(self._work(start))
        stop = threading.Thread(target=self._wait_for_stop, args=(loop, work), daemon=True)
        stop.start()
        report = asyncio.ensure_future(self._report())
        cpu_before = time.process_time()
        await asyncio.wait({work})
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        cpu = time.process_time() - cpu_before
        report.cancel()
        self._send_progress()
        await self._client.close()
        if not work.cancelled():
            work.result()
        return Result(self._recorder.pack(), cpu / max(time.perf_counter() - start, 1e-9))

    async def _work(self, start: float) -> None:
        places = asyncio.Semaphore(self._plan.slots) if self._plan.slots is not None else None
        last = start + self._plan.max_seconds if self._plan.max_seconds is not None else math.inf
        while True:
            if places is not None and not await _acquired(places, last):
                break
            index = self._take()
            if index is None or start + self._plan.arrivals[index] > last:
                break
            due = start + self._plan.arrivals[index]
            while (delay := due - time.perf_counter()) > 0:  # the event loop may wake up a little early
                await asyncio.sleep(delay)
            if time.perf_counter() > last:
                break
            task = asyncio.ensure_future(self._client.run(self._jobs[index]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            if places is not None:
                task.add_done_callback(lambda _: places.release())
        while self._running:
            await asyncio.wait(self._running)

    def _take(self) -> int | None:
        with self._counter.get_lock():
            index = self._counter.value
            if index >= len(self._jobs):
                return None
            self._counter.value = index + 1
            return index

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            self._send_progress()

    def _send_progress(self) -> None:
        client = self._client
        progress = Progress(client.done, client.failed, client.output_tokens, len(self._running))
        self._pipe.send_bytes(msgspec.msgpack.encode(progress))

    def _wait_for_stop(self, loop: asyncio.AbstractEventLoop, work: asyncio.Future[None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._pipe.recv_bytes()
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(work.cancel)


async def _acquired(places: asyncio.Semaphore, last: float) -> bool:
    """Take a place; False where none is free before `time.perf_counter()` = `last`."""
    if last == math.inf:
        await places.acquire()
        return True
    try:
        await asyncio.wait_for(places.acquire(), last - time.perf_counter())
    except (TimeoutError, asyncio.TimeoutError):
        return False
    return True
