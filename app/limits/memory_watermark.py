"""A watermark of memory: below it requests are refused, so that the kernel has nothing to kill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tessera.engine.contract.errors import EngineUnavailableError
from tessera.engine.contract.machine import available_memory

INTERVAL = 0.2  # seconds between two looks


class LowMemoryError(EngineUnavailableError):
    """The machine, or the container, is short of memory."""

    code = "out_of_memory"


class MemoryWatermark:
    """Refuses where less than `min_free` bytes are available to this process; 0 never refuses.

    Between `start` and `close` a thread looks: the kernel counts for a tenth of a millisecond, which a request would
    wait. Otherwise checks look themselves, now and then.
    """

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
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        if self._min_free:
            self._look()
            self._thread = threading.Thread(target=self._watch, name="memory watermark", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise LowMemoryError while memory is short."""
        if not self._min_free:
            return
        if self._thread is None:
            now = self._clock()
            if now - self._looked_at >= INTERVAL:
                self._looked_at = now
                self._look()
        if self._is_low:
            raise LowMemoryError("The server is short of memory and takes no requests just now; please try again.")

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        free = self._available()
        self._is_low = free is not None and free < self._min_free
