"""A watermark of memory: below it requests are refused, so that the kernel has nothing to kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tessera.engine.contract.errors import EngineUnavailableError

INTERVAL = 0.2  # seconds between two looks
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


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


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes that can still be had: the machine's, or what the container's limit leaves; None if that is not known.

    Pages that cache files count as available, because the kernel gives them up first.
    """
    found = []
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                found.append(int(value.split()[0]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        most = (cgroup / "memory.max").read_text().strip()
        if most != "max":
            used = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            found.append(int(most) - used + cached)
    except (OSError, ValueError):
        pass
    return min(found, default=None)
