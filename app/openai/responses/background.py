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
from tessera.app.openai.responses.journal import EVENT_END, Journal
from tessera.engine.contract.errors import EngineUnavailableError, RequestError

logger = logging.getLogger("tessera.app")

FLUSH = 0.1  # seconds between two writes to the journal

# Stores a response in its last state: (response, number of the first of the events, events).
End = Callable[[dict[str, Any], int, bytes], Awaitable[None]]


class BackgroundJob:
    """One response in the background, begun in the journal as `seq`."""

    def __init__(self, journal: Journal, seq: int, generation: Generation, events: ResponseEvents, end: End) -> None:
        self._journal = journal
        self._seq = seq
        self._generation = generation
        self._events = events
        self._end = end
        self._buffer = [events.opening()]
        self._num_events = 0

    async def run(self, timeout: float) -> None:
        """To the end, within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        reader = asyncio.ensure_future(self._read())
        try:
            while not reader.done():
                await asyncio.wait({reader}, timeout=FLUSH)
                goes_on = await self._flush()
                if not reader.done() and not goes_on:
                    self._buffer.append(self._events.cancellation())
                    break
                if loop.time() > deadline:
                    raise GenerationTimeoutError(f"The answer was not complete within {timeout:g} seconds.")
            else:
                reader.result()
                self._buffer.append(self._events.closing())
        except RequestError as error:
            self._buffer.append(self._events.failure(error))
        except asyncio.CancelledError:
            self._buffer.append(self._events.failure(EngineUnavailableError("The server was stopped.")))
        except Exception:
            logger.exception("a response in the background failed")
            self._buffer.append(self._events.failure(InternalError()))
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await self._generation.abort()
            await self._finish()

    async def _read(self) -> None:
        async for delta in self._generation.deltas():
            self._buffer.append(self._events.delta(delta))

    async def _flush(self) -> bool:
        """Write what has come; -> whether the job goes on."""
        first, data = self._take_buffer()
        return await self._journal.append(self._seq, first, data)

    async def _finish(self) -> None:
        first, data = self._take_buffer()
        try:
            await self._end(self._events.last_state(), first, data)
        except RequestError:  # the disk is full, say; its readers find that it has ended
            logger.warning("the end of a response in the background could not be stored")

    def _take_buffer(self) -> tuple[int, bytes]:
        first, data = self._num_events, b"".join(self._buffer)
        self._buffer.clear()
        self._num_events += data.count(EVENT_END)
        return first, data


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
    """The jobs of this app process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, job: BackgroundJob, timeout: float) -> None:
        task = asyncio.ensure_future(job.run(timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all jobs as failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
