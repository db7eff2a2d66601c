"""The order in which requests start their work on the event loop: in turn by account, a few in each of its passes.

All that are ready in one pass of the loop would run in it otherwise: hundreds of one key's requests that arrive
together would hold up every other key's for as long as they take. Where only one key has requests, a pass has more of
them: the tokens of those that have started come between the passes, and delay the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_STARTS = 4  # in one pass; each takes about a millisecond to read, check and hand to the engine
MAX_STARTS_ALONE = 128  # of the one account that has requests: between passes come the tokens of all who stream


class StartQueue:
    """Requests that wait for their start, first in, first out for each account, and round robin among accounts.

    Used in the event loop's thread.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()  # the next account is first
        self._under_way: Counter[int] = Counter()  # requests by account, those that wait among them
        self._num_started = 0  # in this pass
        self._has_pass = False  # `_begin_pass` will be called

    @asynccontextmanager
    async def request(self, account_id: int) -> AsyncIterator[None]:
        """The body of the `with` is the request: it begins in this pass while that has room, or in one of the next."""
        self._under_way[account_id] += 1
        try:
            await self._wait_for_start(account_id)
            yield
        finally:
            self._under_way[account_id] -= 1
            if not self._under_way[account_id]:
                del self._under_way[account_id]

    @property
    def _max_starts(self) -> int:
        return MAX_STARTS if len(self._under_way) > 1 else MAX_STARTS_ALONE

    async def _wait_for_start(self, account_id: int) -> None:
        loop = asyncio.get_running_loop()
        if not self._has_pass:
            self._has_pass = True
            loop.call_soon(self._begin_pass)
        if not self._waiting and self._num_started < self._max_starts:
            self._num_started += 1
            return
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(account_id, deque()).append(future)
        await future

    def _begin_pass(self) -> None:
        self._num_started = 0
        while self._waiting and self._num_started < self._max_starts:
            account_id, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[account_id] = futures
            if not future.done():  # or its request has ended
                future.set_result(None)
                self._num_started += 1
        self._has_pass = self._num_started > 0
        if self._has_pass:
            asyncio.get_running_loop().call_soon(self._begin_pass)
