"""Stalls: a thread that serves everybody, held up by the work for one request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tessera.engine.contract.logs import request_fields

logger = logging.getLogger("tessera.stall")

MAX_FRAMES = 12  # of a stack that is reported, the innermost
SAMPLES_PER_LIMIT = 4
LONGEST_PAUSE, SHORTEST_PAUSE = 0.25, 0.002  # seconds between two looks


@dataclass(frozen=True)
class Stall:
    """A turn of a thread that took longer than it may.

    Attributes:
        seconds: from its beginning to its end.
        own_seconds: the same without the time in which the machine ran other programs; see `own_seconds`.
        request: the request that was worked on, if the stack tells.
        stack: the innermost frames, the last innermost, when the limit had passed; empty if the turn ended before
            the watch could look.
    """

    thread: str
    seconds: float
    own_seconds: float
    request: str | None
    stack: tuple[str, ...]

    def __str__(self) -> str:
        where = " < ".join(reversed(self.stack)) or "unknown, it held the interpreter's lock"
        what = f" for {self.request}" if self.request else ""
        return (
            f"{self.thread} was held up for {1000 * self.seconds:.0f} ms{what} "
            f"({1000 * self.own_seconds:.0f} ms of its own): {where}"
        )


def log_stall(stall: Stall) -> None:
    fields = request_fields(stall.request) if stall.request and " " not in stall.request else {}
    logger.warning("%s", stall, extra={"fields": fields})


class ThreadClock:
    """Time that one thread of this process has waited for a core, in seconds.

    From /proc/self/task/TID/schedstat, whose second number it is in nanoseconds; 0 where the kernel has none.
    """

    def __init__(self, native_id: int) -> None:
        try:
            self._fd: int | None = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def waited(self) -> float:
        if self._fd is None:
            return 0.0
        try:
            return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def own_seconds(seconds: float, waited: float, computed: float, *, was_seen: bool) -> float:
    """Seconds of a turn of `seconds` that are the process's own fault.

    Where the watch never saw the stack, a thread of this process held the interpreter's lock all the time. It computes
    as long as it runs, so what the process did not compute is time in which the machine ran others.

    Args:
        waited: seconds in which the thread was ready, but the machine ran others.
        computed: seconds of processor time of the whole process.
    """
    own = max(seconds - waited, 0.0)
    return own if was_seen else min(own, computed)


class StallWatch:
    """A thread that looks again and again whether the watched one is still in a turn that has taken too long.

    The watched thread calls `begin` and `end`, and `pause` and `resume` around what does not count. `end` returns
    the seconds that count. The watch costs a few look-ups a second. Clocks that take a call of the kernel are read
    when a turn has ended, for the next one: the first token of a request does not wait for them, and a wait for a core
    between two turns counts as none of the thread's own.

    Args:
        thread: what the reports call the watched thread, which makes this object.
        limit: seconds that a turn may take; 0 watches nothing, and `begin` and `end` still measure.
        report: called in the watched thread.
    """

    def __init__(self, thread: str, limit: float, report: Callable[[Stall], None] = log_stall) -> None:
        self._thread = thread
        self._limit = limit
        self._report = report
        self._ident = threading.get_ident()
        self._clock = ThreadClock(threading.get_native_id()) if limit else None
        self._began: float | None = None
        self._before = 0.0  # counted in this turn before the last pause
        self._waited, self._computed = self._clock_times()
        self._seen: tuple[str | None, tuple[str, ...]] | None = None
        self._stopped = threading.Event()
        if limit:
            threading.Thread(target=self._run, name=f"watch of {thread}", daemon=True).start()

    def begin(self) -> None:
        self._before, self._seen = 0.0, None
        self._began = time.perf_counter()

    def pause(self) -> None:
        if self._began is not None:
            self._before += time.perf_counter() - self._began
            self._began = None

    def resume(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> float:
        """End the turn; -> its seconds without pauses."""
        self.pause()
        seconds = self._before
        if self._clock is not None:
            waited, computed = self._clock_times()
            if seconds > self._limit:
                request, stack = self._seen or (None, ())
                own = own_seconds(seconds, waited - self._waited, computed - self._computed, was_seen=bool(stack))
                self._report(Stall(self._thread, seconds, own, request, stack))
            self._waited, self._computed = waited, computed
        return seconds

    def _clock_times(self) -> tuple[float, float]:
        """Seconds in which the thread has waited for a core, and of processor time of the process."""
        return (self._clock.waited(), time.process_time()) if self._clock is not None else (0.0, 0.0)

    def close(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = min(max(self._limit / SAMPLES_PER_LIMIT, SHORTEST_PAUSE), LONGEST_PAUSE)
        while not self._stopped.wait(pause):
            began = self._began
            if began is None or self._seen is not None or time.perf_counter() - began + self._before <= self._limit:
                continue
            found = stack_of(self._ident)
            if self._began == began:  # still the same turn
                self._seen = found
        if self._clock is not None:
            self._clock.close()


def stack_of(ident: int) -> tuple[str | None, tuple[str, ...]]:
    """-> the request that a thread works on, if its frames tell, and its innermost frames."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return None, ()
    frames = traceback.extract_stack(frame)[-MAX_FRAMES:]
    lines = tuple(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in frames)
    return _request_in(frame), lines


def _request_in(frame: FrameType | None) -> str | None:
    """The request of the innermost frame that has one: an ASGI scope, or a message to the engine."""
    while frame is not None:
        variables: dict[str, Any] = frame.f_locals
        scope = variables.get("scope")
        if isinstance(scope, dict) and "path" in scope:
            return f"{scope.get('method')} {str(scope['path'])[:200]}"
        for name in ("message", "request", "sequence"):
            request_id = getattr(variables.get(name), "request_id", None)
            if isinstance(request_id, str):
                return request_id
        frame = frame.f_back
    return None
