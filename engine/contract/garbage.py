"""Collections of garbage in a process that serves: when they hold up nobody.

Python's collector looks at all objects that have lived for a while, as soon as there are a quarter more of them, and
the thread that has just made one waits: 130 ms for the 150,000 objects of a few hundred requests. Garbage in cycles is
rare here, so the old objects can wait until few of them are left, or until nobody waits for an answer.
"""

from __future__ import annotations

import gc
import sys

NEVER = 2**31 - 1
YOUNG_BETWEEN = 10  # collections of middle-aged objects, 7,000 allocations each, between two looks
FEW_BLOCKS = 60_000  # of memory: all of them are collected in 3 to 10 ms
MANY_BLOCKS = 2_000_000  # from here on garbage is worth a stall; about 150 MB


class OldGarbage:
    """Collects old objects when a look finds the time for it, in place of Python itself.

    Blocks of memory are counted, which takes microseconds. Without this object Python goes on as ever.
    """

    def __init__(self, few: int = FEW_BLOCKS, many: int = MANY_BLOCKS) -> None:
        self._few = few
        self._many = self._most = many
        self._next_look = YOUNG_BETWEEN
        self._num_frozen = 0  # blocks

    def take_over(self) -> None:
        """To be called once all is loaded: what there is now stays, and no collection looks at it again."""
        gc.collect()
        self._freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        gc.enable()

    def look(self, *, is_idle: bool) -> bool:
        """Collect if it is time; -> whether that was done. Next to free where nothing is due."""
        num_young = gc.get_count()[2]
        if num_young < self._next_look:
            return False
        blocks = self._num_blocks()
        if self._few < blocks < self._most and not is_idle:
            self._next_look = num_young + YOUNG_BETWEEN
            return False
        gc.collect()
        left = self._num_blocks()
        if is_idle and left > self._few // 2:
            self._freeze()  # caches, which would make each later collection longer
        self._next_look = YOUNG_BETWEEN
        self._most = max(self._many, 2 * self._num_blocks())
        return True

    def _freeze(self) -> None:
        gc.freeze()
        self._num_frozen = sys.getallocatedblocks()

    def _num_blocks(self) -> int:
        return sys.getallocatedblocks() - self._num_frozen
