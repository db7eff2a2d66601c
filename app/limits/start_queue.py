"""The order in which requests start their work on the event loop: in turn by account, a few in each of its passes.

All that are ready in one pass of the loop would run in it otherwise: hundreds of one key's requests that arrive
together would hold up every other key's for as long as they take.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

MAX_STARTS = 4  # in one pass; each takes about a millisecond to read, check and hand to the engine


class StartQueue:
    """Requests that wait for their start, first in, first out for each account, and round robin among accounts.

    Used in the event loop's thread.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()  # the next account is first
        self._num_started = 0  # in this pass
        self._has_pass = False  # `_begin_pass` will be called

    async def wait_for_start(self, account_id: int) -> None:
        """Return at once while this pass has room, and otherwise in one of the next."""
        loop = asyncio.get_running_loop()
        if not self._has_pass:
            self._has_pass = True
            loop.call_soon(self._begin_pass)
        if not self._waiting and self._num_started < MAX_STARTS:
            self._num_started += 1
            return
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(account_id, deque()).append(future)
        await future

    def _begin_pass(self) -> None:
        self._num_started = 0
        while self._waiting and self._num_started < MAX_STARTS:
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
