"""The C library's heap: what a burst of large requests has used goes back to the system.

glibc keeps freed memory for later, in an arena for each thread, and keeps more once large blocks have been freed. One
burst would so stay in every process for ever. Where the C library is another one, nothing here does anything.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h
MADV_DONTNEED = 4  # sys/mman.h
LARGE_BLOCK = 2**20  # bytes; larger blocks are the system's again once they are freed
NUM_ARENAS = 2
INTERVAL = 5.0  # seconds between two looks
GROWTH = 8 * 2**20  # bytes beyond what was left by the last trim, from which another is worth its time
PAGE = os.sysconf("SC_PAGE_SIZE")


def bound_heap() -> None:
    """Keep no large blocks, and few arenas: for a process whose steady work needs no large blocks."""
    if (mallopt := _function("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_ARENA_MAX, NUM_ARENAS)


def trim_heap() -> None:
    """Give free pages back; takes milliseconds, in which this thread lets go of the interpreter's lock."""
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
    """A thread that trims the heap after the process has grown."""

    def __init__(
        self,
        interval: float = INTERVAL,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._interval = interval
        self._resident = resident
        self._trim = trim
        self._left = resident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heap", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """Trim if the process has grown."""
        resident = self._resident()
        if resident > self._left + GROWTH:
            self._trim()
            resident = self._left = self._resident()
        self._left = min(self._left, resident)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.look()


def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
