"""The event loop's lag: how long what is ready waits for its turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from tessera.app.http.access_log import request_of
from tessera.engine.contract.stalls import (
    OLDEST_LOOK,
    Stall,
    ThreadClock,
    ThreadTimes,
    log_stall,
    sight_before,
    sight_of,
    stall_of,
)

INTERVAL = 0.1  # seconds between two looks
LOOKS_PER_LIMIT = 4
LEAST_LATE = 0.005  # seconds; less may be the timer's, or a few turns of other threads
PATIENCE = 1.0  # seconds after which a look checks whether it has been told to stop


class LoopLag:
    """A thread that asks the event loop for a sign and measures how long that takes.

    To be made and started in the loop's own thread.

    Args:
        observe: called in the thread with each lag, in seconds.
        limit: lag in seconds beyond which `report` is called, in the thread as well.
    """

    def __init__(
        self,
        observe: Callable[[float], None],
        limit: float,
        report: Callable[[Stall], None] = log_stall,
    ) -> None:
        self._observe = observe
        self._limit = limit
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._clock = ThreadClock(threading.get_native_id())
        self._before, self._looked = sight_before(), time.perf_counter()
        self._signed = threading.Event()
        self._signed_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event loop's lag", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _sign(self) -> None:
        self._signed_at = time.perf_counter()
        self._signed.set()

    def _run(self) -> None:
        clock = ThreadClock(threading.get_native_id())
        interval = min(INTERVAL, self._limit / LOOKS_PER_LIMIT)
        while True:
            if time.perf_counter() - self._looked > OLDEST_LOOK:
                self._before, self._looked = sight_before(), time.perf_counter()
            own, computed, waited = self._clock.times(), time.process_time(), clock.times().waited
            due = time.perf_counter() + interval
            if self._stopped.wait(interval):
                break
            late = time.perf_counter() - due - (clock.times().waited - waited)
            # The interpreter's lock was not to be had, for the loop no more than for this thread.
            self._look(own, computed, late if late > LEAST_LATE else 0.0)
        self._clock.close()
        clock.close()

    def _look(self, own: ThreadTimes, computed: float, late: float) -> None:
        """Measure the lag.

        Args:
            own, computed: times of the loop's thread and the process before this look was due.
            late: seconds since then for which it could not begin.
        """
        self._signed.clear()
        asked = time.perf_counter() - late
        try:
            self._loop.call_soon_threadsafe(self._sign)
        except RuntimeError:  # closed
            self._stopped.set()
            return
        sight = self._before
        if not self._signed.wait(self._limit):
            seen = sight_of(self._ident, request_of(asyncio.current_task(self._loop)))
            if not self._signed.is_set():
                sight = seen
        while not self._signed.wait(PATIENCE):
            if self._stopped.is_set():
                return
        seconds = self._signed_at - asked
        self._observe(seconds)
        if seconds > self._limit:
            own, computed = self._clock.times().since(own), time.process_time() - computed
            self._report(stall_of("the event loop", self._ident, seconds, own, computed, sight))
