"""A bound on the CPU time of this process, by pauses."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

INTERVAL = 0.02  # seconds of CPU time between two looks
LONGEST_PAUSE = 1.0  # seconds
LOWEST_PRIORITY = 19


class CpuShare:
    """Holds the process to `share` of the time of `num_cpus` CPUs, whatever it computes: call it in the main thread.

    A timer looks each INTERVAL of CPU time, and its handler waits until the clock has caught up.
    """

    def __init__(self, share: float, num_cpus: int) -> None:
        self._cpus = share * num_cpus
        self._clock, self._cpu = time.monotonic(), time.process_time()

    def start(self) -> None:
        """From now on, at the lowest priority."""
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
        signal.signal(signal.SIGPROF, self._pause)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)

    def stop(self) -> None:
        """Before the process ends: the interpreter takes the handler away, and the signal would kill it."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _pause(self, signum: int, frame: FrameType | None) -> None:
        used = time.process_time() - self._cpu
        due = used / self._cpus - (time.monotonic() - self._clock)
        if due > 0:
            time.sleep(min(due, LONGEST_PAUSE))
        self._clock, self._cpu = time.monotonic(), time.process_time()
