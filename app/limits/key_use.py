"""Use of each key of the keys file, counted over all app processes."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable

from tessera.app.keys.keys_file import MAX_KEYS
from tessera.app.limits.shared_memory import map_counts

WINDOW = 60.0  # seconds


class Cell(enum.IntEnum):
    """The counts of a key, in each process's part."""

    REQUESTS_UNDER_WAY = 0
    SEQUENCES_UNDER_WAY = 1
    NUM_REQUESTS = 2
    NUM_REFUSED = 3
    NUM_PROMPT_TOKENS = 4
    NUM_GENERATED_TOKENS = 5


class Rate(enum.IntEnum):
    """Counts by time: the first of three cells, which hold a window's number, its count, and that of the one before."""

    REQUESTS = 6
    TOKENS = 9


NUM_CELLS = 12
NOT_KEPT = (Cell.REQUESTS_UNDER_WAY, Cell.SEQUENCES_UNDER_WAY)  # when a process is started again


class KeyUse:
    """Counts by key's slot. A process adds to its own part and reads all of them, without locks: two processes that
    decide at the same moment may each admit a request beyond a limit.
    """

    def __init__(
        self,
        fd: int | None = None,
        num_parts: int = 1,
        part: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fd`: see `map_counts`; `clock` is one for all processes."""
        self._counts = map_counts(fd, num_parts * MAX_KEYS * NUM_CELLS)
        self._part_length = MAX_KEYS * NUM_CELLS
        self._begin = part * self._part_length
        self._clock = clock
        for slot in range(MAX_KEYS):
            for cell in NOT_KEPT:
                self._counts[self._begin + slot * NUM_CELLS + cell] = 0

    def count(self, slot: int, cell: Cell, amount: int = 1) -> None:
        self._counts[self._begin + slot * NUM_CELLS + cell] += amount

    def total(self, slot: int, cell: Cell) -> int:
        return sum(self._counts[slot * NUM_CELLS + cell :: self._part_length])

    def count_rate(self, slot: int, rate: Rate, amount: int) -> None:
        first = self._begin + slot * NUM_CELLS + rate
        window = int(self._clock() // WINDOW)
        known = self._counts[first]
        if known != window:
            self._counts[first + 2] = self._counts[first + 1] if known == window - 1 else 0
            self._counts[first + 1] = 0
            self._counts[first] = window
        self._counts[first + 1] += amount

    def in_last_minute(self, slot: int, rate: Rate) -> float:
        """The count of the last 60 seconds, if those of the last window came evenly (a sliding window counter)."""
        before, current, passed = self._windows(slot, rate)
        return before * (1 - passed) + current

    def seconds_until(self, slot: int, rate: Rate, most: float) -> float:
        """Seconds after which, without further use, the last minute's count is at most `most`."""
        before, current, passed = self._windows(slot, rate)
        most = max(most, 0.0)
        if before * (1 - passed) + current <= most:
            return 0.0
        if current <= most:
            return (1 - passed - (most - current) / before) * WINDOW
        return WINDOW * (1 - passed) + WINDOW * (1 - most / current)

    def _windows(self, slot: int, rate: Rate) -> tuple[int, int, float]:
        """Counts of the last window and of this one, and the share of this one that has passed."""
        number, passed = divmod(self._clock(), WINDOW)
        window = int(number)
        before = current = 0
        for begin in range(slot * NUM_CELLS + rate, len(self._counts), self._part_length):
            known = self._counts[begin]
            if known == window:
                current += self._counts[begin + 1]
                before += self._counts[begin + 2]
            elif known == window - 1:
                before += self._counts[begin + 1]
        return before, current, passed / WINDOW


def duration(seconds: float) -> str:
    """As OpenAI writes it: 1s, 6m0s."""
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"
