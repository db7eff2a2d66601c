"""Readers of journals, for all of whom one look finds what is new: a thousand of them cost no thousand looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from tessera.app.http.errors import InternalError
from tessera.app.openai.responses.journal import EVENT_END, AskedEvents, Journal, JournalPart
from tessera.engine.contract.errors import RequestError

logger = logging.getLogger("tessera.app")

POLL = 0.1  # seconds between two looks for new events
WOKEN_AT_A_TIME = 16  # readers, in one turn of the event loop


class JournalWatch:
    """Looks for all readers of this app process."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._waiting: dict[asyncio.Future[JournalPart | None], AskedEvents] = {}
        self._looking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def wait_for(self, asked: AskedEvents) -> JournalPart | None:
        """Once one of the events is there, or none will be. Raises StoreUnavailableError."""
        future: asyncio.Future[JournalPart | None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = asked
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_while_any())
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def _look_while_any(self) -> None:
        while self._waiting:
            waiting = list(self._waiting.items())
            try:
                await self._look(waiting)
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("the events of responses in the background could not be read")
                for future, _ in waiting:
                    if not future.done():
                        future.set_exception(error if isinstance(error, RequestError) else InternalError())
            await asyncio.sleep(POLL)

    async def _look(self, waiting: list[tuple[asyncio.Future[JournalPart | None], AskedEvents]]) -> None:
        parts = await self.journal.read([asked for _, asked in waiting])
        at_work: dict[int, bool] = {}
        num_woken = 0
        for (future, asked), part in zip(waiting, parts, strict=True):
            if part is not None and not part.ended and not _has(part, asked.number):
                if part.seq not in at_work:
                    at_work[part.seq] = await self.journal.is_at_work(part)
                if at_work[part.seq]:
                    continue
            if not future.done():
                future.set_result(part)
                num_woken += 1
                if num_woken % WOKEN_AT_A_TIME == 0:
                    await asyncio.sleep(0)


class JournalReader:
    """A response's events after number `after`, to the end, as the source of an event stream."""

    num_values = None

    def __init__(self, watch: JournalWatch, tenant: str, response_id: str, after: int = -1) -> None:
        self._watch = watch
        self._key = (tenant, response_id)
        self._next = after + 1

    async def wait_accepted(self, seconds: float) -> None:
        """The engine took the request before the journal was begun."""

    async def deltas(self) -> AsyncGenerator[bytes, None]:
        while (part := await self._watch.wait_for(AskedEvents(*self._key, self._next))) is not None:
            before = self._next
            for first, data in part.pieces:
                events = data.split(EVENT_END)[:-1]
                if fresh := events[max(0, self._next - first) :]:
                    self._next = first + len(events)
                    yield EVENT_END.join(fresh) + EVENT_END
            if part.ended:
                return
            if self._next == before:  # its process has died
                await self._watch.journal.settle(*self._key, part)

    async def abort(self) -> None:
        """The response goes on without its readers."""


def _has(part: JournalPart, number: int) -> bool:
    """Whether event `number` is among the pieces."""
    return bool(part.pieces) and part.pieces[-1][0] + part.pieces[-1][1].count(EVENT_END) > number
