"""The event loop's lag: how long what is ready waits for its turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from tessera.engine.contract.stalls import Stall, ThreadClock, log_stall, own_seconds, stack_of

INTERVAL = 0.1  # seconds between two looks
LOOKS_PER_LIMIT = 4
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
        interval = min(INTERVAL, self._limit / LOOKS_PER_LIMIT)
        while not self._stopped.wait(interval):
            self._look()
        self._clock.close()

    def _look(self) -> None:
        self._signed.clear()
        waited, computed, asked = self._clock.waited(), time.process_time(), time.perf_counter()
        try:
            self._loop.call_soon_threadsafe(self._sign)
        except RuntimeError:  # closed
            self._stopped.set()
            return
        found: tuple[str | None, tuple[str, ...]] = (None, ())
        if not self._signed.wait(self._limit):
            seen = stack_of(self._ident)
            if not self._signed.is_set():
                found = seen
        while not self._signed.wait(PATIENCE):
            if self._stopped.is_set():
                return
        seconds = self._signed_at - asked
        self._observe(seconds)
        if seconds > self._limit:
            waited, computed = self._clock.waited() - waited, time.process_time() - computed
            own = own_seconds(seconds, waited, computed, was_seen=bool(found[1]))
            self._report(Stall("the event loop", seconds, own, *found))
