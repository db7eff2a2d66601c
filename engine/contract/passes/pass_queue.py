"""Work on an event loop in turn by account, as much in each of the loop's passes as takes a few milliseconds.

All that is ready in one pass runs in it otherwise: what hundreds of one key's requests have to do at once would hold
up every other key's for as long as it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tessera.engine.contract.passes.account_queue import AccountQueue

NEWEST = 0.25  # weight of the newest pass in the mean


class PassQueue:
    """Begins what waits, first in, first out for each account, and round robin among accounts.

    Used in the event loop's thread.

    Attributes:
        is_shared: others wait for what begins here, so only `least` begin in a pass.
    """

    def __init__(self, seconds: float, least: int, most: int, clock: Callable[[], float] | None = None) -> None:
        """As many begin in a pass as take `seconds`, as far as those before tell, but `least` at least.

        Without `clock` the thread's own time counts: what other programs take is no reason to do less.
        """
        self.is_shared = False
        self._seconds = seconds
        self._least = least
        self._most = most
        self._clock = clock if clock is not None else time.thread_time
        self._mean = seconds / least  # that one takes; it is learnt as soon as some have to wait
        self._waiting: AccountQueue[Callable[[], bool]] = AccountQueue()
        self._num_begun = 0  # in this pass
        self._num_measured = 0  # of them, which run one after the other
        self._measured_since = 0.0
        self._has_pass = False  # `_begin_pass` will be called

    def enter(self) -> bool:
        """Whether one more may begin at once, which counts."""
        self._expect_pass()
        if self._waiting or self._num_begun >= self._room:
            return False
        self._num_begun += 1
        return True

    def put(self, account_id: int, begin: Callable[[], bool]) -> None:
        """Call `begin` in one of the next passes. It has the loop run the work, and returns False if there is none."""
        self._expect_pass()
        self._waiting.put(account_id, begin)

    def _expect_pass(self) -> None:
        if not self._has_pass:
            self._has_pass = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    @property
    def _room(self) -> int:
        return self._least if self.is_shared else max(self._least, min(int(self._seconds / self._mean), self._most))

    def _begin_pass(self) -> None:
        if self._num_measured:  # between `_measure` and this nothing else has run
            seconds = (self._clock() - self._measured_since) / self._num_measured
            self._mean += NEWEST * (max(seconds, self._seconds / self._most) - self._mean)
            self._num_measured = 0
        self._num_begun = 0
        loop = asyncio.get_running_loop()
        if self._waiting:
            loop.call_soon(self._measure)
            room = self._room
            while self._waiting and self._num_begun < room:
                self._num_begun += self._waiting.take()()
            self._num_measured = self._num_begun
        self._has_pass = self._num_begun > 0
        if self._has_pass:
            loop.call_soon(self._begin_pass)

    def _measure(self) -> None:
        self._measured_since = self._clock()
