"""The order in which requests start their work on the event loop: in turn by account, a few in each of its passes.

Where only one key has requests, a pass has more of them: the tokens of those that have started come between the passes,
and delay the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tessera.engine.contract.passes.pass_queue import PassQueue

MAX_STARTS = 2  # in one pass; each takes about a millisecond to read, check and hand to the engine
MAX_STARTS_ALONE = 32  # of the one account that has requests, as far as they take no longer than
START_SECONDS = 0.004  # in one pass: so long another key's request waits that comes meanwhile


class _Waiting:
    """A request that has not begun."""

    __slots__ = ("account_id", "future")

    def __init__(self, account_id: int) -> None:
        self.account_id = account_id
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> bool:
        if self.future.done():  # the request has ended
            return False
        self.future.set_result(None)
        return True


class StartQueue:
    """Requests that wait for their start. Used in the event loop's thread."""

    def __init__(self) -> None:
        self._queue = PassQueue(_Waiting.start, START_SECONDS, MAX_STARTS, MAX_STARTS_ALONE)
        self._under_way: Counter[int] = Counter()  # requests by account, those that wait among them

    @asynccontextmanager
    async def request(self, account_id: int) -> AsyncIterator[None]:
        """The body of the `with` is the request: it begins in this pass while that has room, or in one of the next."""
        self._under_way[account_id] += 1
        self._queue.is_shared = len(self._under_way) > 1
        try:
            await self._wait_for_start(account_id)
            yield
        finally:
            self._under_way[account_id] -= 1
            if not self._under_way[account_id]:
                del self._under_way[account_id]
                self._queue.is_shared = len(self._under_way) > 1

    async def _wait_for_start(self, account_id: int) -> None:
        if self._queue.enter():
            return
        waiting = _Waiting(account_id)
        self._queue.put([waiting])
        try:
            await waiting.future
        except asyncio.CancelledError:  # the time for the drain is over, and the request's own code says so
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
