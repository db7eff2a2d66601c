"""Responses in the background: they go on without the client, who polls them or resumes their stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tessera.app.generate.generation import Generation
from tessera.app.http.errors import GenerationTimeoutError, InternalError
from tessera.app.http.streaming import COMMENT
from tessera.app.openai.responses.events import ResponseEvents
from tessera.app.openai.responses.journal import EVENT_END, Journal, NewEvents
from tessera.app.store.errors import StoreFullError
from tessera.engine.contract.errors import EngineUnavailableError, RequestError

logger = logging.getLogger("tessera.app")

FLUSH = 0.1  # seconds between two writes to the journal

# Stores a response in its last state: (response, number of the first of the events, events).
End = Callable[[dict[str, Any], int, bytes], Awaitable[None]]


class BackgroundJob:
    """One response in the background, begun in the journal as `seq`."""

    def __init__(self, seq: int, generation: Generation, events: ResponseEvents, end: End) -> None:
        self.seq = seq
        self._generation = generation
        self._events = events
        self._end = end
        self._buffer = [events.opening()]
        self._num_events = 0
        self._is_stopped = asyncio.Event()
        self._error: RequestError | None = None

    def stop(self, error: RequestError | None = None) -> None:
        """End it as cancelled, or as failed with an error."""
        self._error = error
        self._is_stopped.set()

    def take_events(self) -> NewEvents:
        """Those since the last call."""
        first, data = self._num_events, b"".join(self._buffer)
        self._buffer.clear()
        self._num_events += data.count(EVENT_END)
        return NewEvents(self.seq, first, data)

    async def run(self, timeout: float) -> None:
        """To the end, within `timeout` seconds."""
        reader, stopped = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._is_stopped.wait())
        try:
            await asyncio.wait({reader, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
                self._buffer.append(self._events.closing())
            elif self._error is not None:
                raise self._error
            elif stopped.done():
                self._buffer.append(self._events.cancellation())
            else:
                raise GenerationTimeoutError(f"The answer was not complete within {timeout:g} seconds.")
        except RequestError as error:
            self._buffer.append(self._events.failure(error))
        except asyncio.CancelledError:
            self._buffer.append(self._events.failure(EngineUnavailableError("The server was stopped.")))
        except Exception:
            logger.exception("a response in the background failed")
            self._buffer.append(self._events.failure(InternalError()))
        finally:
            reader.cancel()
            stopped.cancel()
            await asyncio.gather(reader, stopped, return_exceptions=True)
            await self._generation.abort()
            await self._finish()

    async def _read(self) -> None:
        async for delta in self._generation.deltas():
            self._buffer.append(self._events.delta(delta))

    async def _finish(self) -> None:
        last = self.take_events()
        try:
            await self._end(self._events.last_state(), last.first, last.data)
        except RequestError:  # the disk is full, say; its readers find that it has ended
            logger.warning("the end of a response in the background could not be stored")


class RecordedEvents:
    """The events of a journal as those of a stream."""

    keepalive = COMMENT

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: bytes) -> bytes:
        return delta

    def closing(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return b""


class BackgroundJobs:
    """The jobs of this app process. What comes of all of them is written together, in one transaction."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._running: dict[BackgroundJob, asyncio.Task[None]] = {}
        self._flushing: asyncio.Task[None] | None = None

    def start(self, job: BackgroundJob, timeout: float) -> None:
        task = self._running[job] = asyncio.ensure_future(job.run(timeout))
        task.add_done_callback(lambda _: self._running.pop(job))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.ensure_future(self._flush_while_any())

    async def close(self) -> None:
        """End all jobs as failed."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)

    async def _flush_while_any(self) -> None:
        while self._running:
            await asyncio.sleep(FLUSH)
            jobs = list(self._running)
            try:
                appended = await self._journal.append([job.take_events() for job in jobs])
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("the events of responses in the background could not be written")
                for job in jobs:
                    job.stop(error if isinstance(error, RequestError) else InternalError())
                continue
            for job in jobs:
                if job.seq in appended.full:
                    job.stop(StoreFullError())
                elif job.seq not in appended.going:
                    job.stop()
