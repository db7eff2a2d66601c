"""Work on an event loop in turn by account, as much in each of the loop's passes as takes a few milliseconds.

All that is ready in one pass runs in it otherwise: what hundreds of one key's requests have to do at once would hold
up every other key's for as long as it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from tessera.engine.contract.passes.account_queue import Accounted, AccountQueue

A = TypeVar("A", bound=Accounted)

NEWEST = 0.25  # weight of the newest pass in the mean


class PassQueue(Generic[A]):
    """Begins what waits, first in, first out for each account, and round robin among accounts.

    Used in the event loop's thread.
    """

    def __init__(
        self,
        begin: Callable[[A], bool],
        seconds: float,
        least: int,
        most: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`begin` has the loop run an item's work, and returns False if there is none.

        As many begin in a pass as take `seconds`, as far as those before tell, but `least` at least. Without `clock`
        the thread's own time counts: what other programs take is no reason to do less.
        """
        self._begin = begin
        self._seconds = seconds
        self._least = least
        self._most = most
        self._clock = clock if clock is not None else time.thread_time
        self._mean = seconds / least  # that one takes; it is learnt as soon as some have to wait
        self._room = least  # in a pass
        self._is_shared = False
        self._waiting: AccountQueue[A] = AccountQueue()
        self._num_begun = 0  # in this pass
        self._num_measured = 0  # of them, which run one after the other
        self._measured_since = 0.0
        self._has_pass = False  # `_begin_pass` will be called

    @property
    def is_shared(self) -> bool:
        """Whether others wait for what begins here, so that only `least` begin in a pass."""
        return self._is_shared

    @is_shared.setter
    def is_shared(self, is_shared: bool) -> None:
        if is_shared != self._is_shared:
            self._is_shared = is_shared
            self._set_room()

    def enter(self, count: int = 1) -> int:
        """Of `count` more items, how many may begin at once; those are counted in this pass."""
        if not self._has_pass:
            self._has_pass = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        if self._waiting or self._num_begun >= self._room:
            return 0
        count = min(count, self._room - self._num_begun)
        self._num_begun += count
        return count

    def put(self, items: Iterable[A]) -> None:
        """Begin what `enter` has not let in in one of the next passes."""
        self._waiting.put(items)

    def _set_room(self) -> None:
        alone = max(self._least, min(int(self._seconds / self._mean), self._most))
        self._room = self._least if self._is_shared else alone

    def _begin_pass(self) -> None:
        if self._num_measured:  # between `_measure` and this nothing else has run
            seconds = (self._clock() - self._measured_since) / self._num_measured
            self._mean += NEWEST * (max(seconds, self._seconds / self._most) - self._mean)
            self._num_measured = 0
            self._set_room()
        self._num_begun = 0
        loop = asyncio.get_running_loop()
        if self._waiting:
            loop.call_soon(self._measure)
            while self._waiting and self._num_begun < self._room:
                for item in self._waiting.take(self._room - self._num_begun):
                    self._num_begun += self._begin(item)
            self._num_measured = self._num_begun
        self._has_pass = self._num_begun > 0
        if self._has_pass:
            loop.call_soon(self._begin_pass)

    def _measure(self) -> None:
        self._measured_since = self._clock()
