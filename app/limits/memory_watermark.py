"""A watermark of memory: below it requests are refused, so that the kernel has nothing to kill."""

from __future__ import annotations

import time
from collections.abc import Callable

from tessera.engine.contract.available_memory import available_memory
from tessera.engine.contract.errors import EngineUnavailableError

INTERVAL = 0.2  # seconds between two looks


class LowMemoryError(EngineUnavailableError):
    """The machine, or the container, is short of memory."""

    code = "out_of_memory"


class MemoryWatermark:
    """Refuses where less than `min_free` bytes are available to this process; 0 never refuses."""

    def __init__(
        self,
        min_free: int,
        available: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_free = min_free
        self._available = available if available is not None else available_memory
        self._clock = clock
        self._looked_at = -INTERVAL
        self._is_low = False

    def check(self) -> None:
        """Raise LowMemoryError while memory is short."""
        if not self._min_free:
            return
        now = self._clock()
        if now - self._looked_at >= INTERVAL:
            self._looked_at = now
            free = self._available()
            self._is_low = free is not None and free < self._min_free
        if self._is_low:
            raise LowMemoryError("The server is short of memory and takes no requests just now; please try again.")
