"""Memory of a process that serves: what a burst of large requests has used goes back to the system, and garbage
collection stalls no request.

glibc keeps freed memory for later, in an arena for each thread, and keeps more once large blocks have been freed. One
burst would so stay in every process for ever. Where the C library is another one, nothing is trimmed.

Python's collector looks at all objects that have lived for a while, as soon as there are a quarter more of them, and
the thread that has just made one waits: 130 ms for the 150,000 objects of a few hundred requests. Garbage in cycles is
rare here, so old objects are collected once few are left, or while the process is idle: then before they are many, and
those that stay are looked at no more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h
MADV_DONTNEED = 4  # sys/mman.h
LARGE_BLOCK = 2**20  # bytes; larger blocks are the system's again once they are freed
NUM_ARENAS = 2
INTERVAL = 5.0  # seconds between two looks
MAX_POSTPONED = 12  # looks in a row at a process that has grown and is busy
GROWTH = 8 * 2**20  # bytes beyond what was left by the last trim, from which another is worth its time
PAGE = os.sysconf("SC_PAGE_SIZE")

NEVER = 2**31 - 1
YOUNG_BETWEEN = 10  # collections of middle-aged objects, 7,000 allocations each, between two looks
FEW_BLOCKS = 60_000  # of memory: all of them are collected in 3 to 10 ms
# About 80 MB. A collection looks at each entry of lists, too: at 100,000 blocks, with bodies of a million numbers among
# them, it took 47 ms and found nothing. So it waits for an idle moment for as long as memory allows.
MANY_BLOCKS = 1_000_000


def bound_heap() -> None:
    """Keep no large blocks, and few arenas: for a process whose steady work needs no large blocks."""
    if (mallopt := _function("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_ARENA_MAX, NUM_ARENAS)


def trim_heap() -> None:
    """Give free pages back, in up to half a millisecond for each megabyte.

    Other threads have the interpreter's lock meanwhile, but wait as soon as they need memory.
    """
    if (malloc_trim := _function("malloc_trim")) is not None:
        malloc_trim(0)


def drop_pages(address: int, nbytes: int) -> None:
    """Give the whole pages of this memory back; it stays usable, and holds anything."""
    begin, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if (madvise := _function("madvise")) is not None and begin < end:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)


def resident_bytes() -> int:
    """Of this process; 0 where that is not known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


class HeapTrimmer:
    """A thread that trims the heap after the process has grown, and is idle, or has been busy for a minute."""

    def __init__(
        self,
        is_idle: Callable[[], bool] = lambda: True,
        interval: float = INTERVAL,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._is_idle = is_idle
        self._interval = interval
        self._num_postponed = 0  # looks
        self._resident = resident
        self._trim = trim
        self._left = resident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heap", daemon=True)

    def start(self) -> None:
        """Before requests come: what loading has used, and there is most of it, goes back now."""
        self._trim()
        self._left = self._resident()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """Trim if the process has grown and is idle, or has been busy for MAX_POSTPONED looks."""
        resident = self._resident()
        if resident <= self._left + GROWTH:
            self._num_postponed = 0
        elif self._num_postponed < MAX_POSTPONED and not self._is_idle():
            self._num_postponed += 1
        else:
            self._num_postponed = 0
            self._trim()
            resident = self._left = self._resident()
        self._left = min(self._left, resident)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.look()


class OldGarbage:
    """Collects old objects when a look finds the time for it, in place of Python itself.

    Blocks of memory are counted, which takes microseconds. Without this object Python goes on as ever.
    """

    def __init__(self, few: int = FEW_BLOCKS, many: int = MANY_BLOCKS) -> None:
        self._few = few
        self._many = self._most = many
        self._next_look = YOUNG_BETWEEN
        self._next_idle_look = 1
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
        is_due = num_young >= self._next_look
        if not is_due and not (is_idle and num_young >= self._next_idle_look):
            return False
        self._next_idle_look = num_young + 1
        blocks = self._num_blocks()
        if not is_due and blocks < self._few:
            return False
        if self._few < blocks < self._most and not is_idle:
            self._next_look = num_young + YOUNG_BETWEEN
            return False
        gc.collect()
        left = self._num_blocks()
        if is_idle and left > self._few // 2:
            self._freeze()  # caches, which would make each later collection longer
        self._next_look, self._next_idle_look = YOUNG_BETWEEN, 1
        self._most = max(self._many, 2 * self._num_blocks())
        return True

    def _freeze(self) -> None:
        gc.freeze()
        self._num_frozen = sys.getallocatedblocks()

    def _num_blocks(self) -> int:
        return sys.getallocatedblocks() - self._num_frozen


def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
