"""Stalls: a thread that serves everybody, held up by the work for one request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import NamedTuple

from tessera.engine.contract.logs import request_fields

logger = logging.getLogger("tessera.stall")

MAX_FRAMES = 12  # of a stack that is reported, the innermost
MAX_OTHERS = 4  # threads that are reported, those that computed most
LEAST_OTHER = 0.001  # seconds
OLDEST_LOOK = 0.25  # seconds; the times of other threads are that old where they were not read during the stall
SAMPLES_PER_LIMIT = 4
LONGEST_PAUSE, SHORTEST_PAUSE = 0.25, 0.002  # seconds between two looks
LATE = 0.5  # seconds by which the watch oversleeps where the process was stopped, or its lock was held
SHORT_LIMIT = 0.1  # seconds; up to it, what a thread computes in its pauses is subtracted


@dataclass(frozen=True)
class Stall:
    """A turn of a thread that took longer than it may.

    Attributes:
        seconds: from its beginning to its end.
        own_seconds: the same without the time in which the machine ran other programs; see `stall_of`.
        request: the request that was worked on, if it is known.
        stack: the innermost frames, the last innermost, when the limit had passed; empty if the turn ended before
            the watch could look.
        others: what other threads of Python computed meanwhile, and where they were then or soon after: one of them
            may have held the interpreter's lock. So may the thread itself, where it was not seen.
    """

    thread: str
    seconds: float
    own_seconds: float
    request: str | None
    stack: tuple[str, ...]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = " < ".join(reversed(self.stack)) or "unknown, the interpreter's lock was held"
        what = f" for {self.request}" if self.request else ""
        others = f"; meanwhile {'; '.join(self.others)}" if self.others else ""
        return (
            f"{self.thread} was held up for {1000 * self.seconds:.0f} ms{what} "
            f"({1000 * self.own_seconds:.0f} ms of its own): {where}{others}"
        )


def log_stall(stall: Stall) -> None:
    fields = request_fields(stall.request) if stall.request and " " not in stall.request else {}
    logger.warning("%s", stall, extra={"fields": fields})


class ThreadTimes(NamedTuple):
    """Seconds that a thread has computed, and that it has waited for a core."""

    computed: float
    waited: float

    def since(self, before: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(self.computed - before.computed, self.waited - before.waited)

    def plus(self, more: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(self.computed + more.computed, self.waited + more.waited)


NO_TIMES = ThreadTimes(0.0, 0.0)


class ThreadClock:
    """The times of one thread of this process.

    From /proc/self/task/TID/schedstat, whose first two numbers they are in nanoseconds; 0 where the kernel has none.
    """

    def __init__(self, native_id: int) -> None:
        try:
            self._fd: int | None = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def times(self) -> ThreadTimes:
        if self._fd is None:
            return NO_TIMES
        try:
            computed, waited = os.pread(self._fd, 64, 0).split()[:2]
        except (OSError, ValueError):
            return NO_TIMES
        return ThreadTimes(int(computed) / 1e9, int(waited) / 1e9)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True)
class Sight:
    """Stacks and times of the threads of Python, at a moment of a stall or before it.

    Attributes:
        request: that the held-up thread works on, if it is known.
        stack: its innermost frames; empty if it was not held up yet.
        others: the other threads' frames, by their idents.
        is_late: the watch could not run for a while before.
    """

    request: str | None
    stack: tuple[str, ...]
    others: dict[int, tuple[str, ...]]
    times: dict[int, ThreadTimes]
    is_late: bool = False


def sight_of(ident: int, request: str | None = None) -> Sight:
    """The stacks of a thread that is held up and of all others but the caller's, and the times of all.

    What stands in the frames' variables is not looked at: they belong to threads that run, and before Python 3.13 that
    can end the process.
    """
    times = _times_of_threads()
    frames = sys._current_frames()
    frame = frames.pop(ident, None)
    frames.pop(threading.get_ident(), None)
    others = {each: _lines_of(its) for each, its in frames.items()}
    return Sight(request, _lines_of(frame), others, times)


def sight_before() -> Sight:
    return Sight(None, (), {}, _times_of_threads())


def _times_of_threads() -> dict[int, ThreadTimes]:
    """Of those that Python has started, which may hold its lock, by their idents."""
    times = {}
    for thread in threading.enumerate():
        if thread.ident is not None and thread.native_id is not None:
            clock = ThreadClock(thread.native_id)
            times[thread.ident] = clock.times()
            clock.close()
    return times


def stall_of(thread: str, ident: int, seconds: float, own: ThreadTimes, computed: float, sight: Sight) -> Stall:
    """The report on a stall that has just ended.

    Where the watch never saw the stack, or was late, a thread of this process held the interpreter's lock all the time.
    It computes as long as it runs, so what the process did not compute is time in which the machine ran others, or the
    process was stopped. Nor is it the process's own fault that a thread which may have held the lock was ready, and the
    machine ran others.

    Args:
        own: what the thread that was held up computed and waited for a core.
        computed: seconds of processor time of the whole process.
        sight: of the stall, or from before it.
    """
    after = sight_of(ident)
    here = threading.get_ident()
    others = {
        each: times.since(sight.times.get(each, NO_TIMES))
        for each, times in after.times.items()
        if each != here and (each != ident or not sight.stack)
    }
    ours = seconds - own.waited
    if sight.stack and not sight.is_late:
        ours = max(ours - sum(times.waited for times in others.values()), own.computed)
    else:
        ours = min(ours, computed)
    names = {each.ident: each.name for each in threading.enumerate()}
    busy = sorted((-times.computed, each) for each, times in others.items() if times.computed >= LEAST_OTHER)
    stacks = {**after.others, ident: after.stack, **sight.others}
    lines = []
    for negative, each in busy[:MAX_OTHERS]:
        where = " < ".join(reversed(stacks.get(each, ()))) or "unknown"
        lines.append(f"{names.get(each, 'a thread')} computed {-1000 * negative:.0f} ms: {where}")
    ours = min(max(ours, 0.0), seconds)  # the clocks may have been read a little before the stall
    return Stall(thread, seconds, ours, sight.request, sight.stack, tuple(lines))


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

    Attributes:
        request: that the watched thread works on, where it says so.
    """

    def __init__(self, thread: str, limit: float, report: Callable[[Stall], None] = log_stall) -> None:
        self.request: str | None = None
        self._thread = thread
        self._limit = limit
        self._report = report
        self._ident = threading.get_ident()
        self._clock = ThreadClock(threading.get_native_id()) if limit else None
        self._began: float | None = None
        self._before = 0.0  # counted in this turn before the last pause
        self._own, self._computed = self._clock_times()
        self._at_pause = self._own, self._computed
        self._before_turn = sight_before()
        self._seen: Sight | None = None
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
            if self._limit <= SHORT_LIMIT:
                self._at_pause = self._clock_times()

    def resume(self) -> None:
        if self._limit <= SHORT_LIMIT:  # count from later on, by as much as the pause had
            (own, computed), (own_before, computed_before) = self._clock_times(), self._at_pause
            self._own = self._own.plus(own.since(own_before))
            self._computed += computed - computed_before
        self._began = time.perf_counter()

    def end(self) -> float:
        """End the turn; -> its seconds without pauses."""
        self.pause()
        seconds = self._before
        if self._clock is not None:
            own, computed = self._clock_times()
            if seconds > self._limit:
                sight = self._seen or self._before_turn
                ours = own.since(self._own)
                self._report(stall_of(self._thread, self._ident, seconds, ours, computed - self._computed, sight))
                own, computed = self._clock_times()
            self._own, self._computed = own, computed
        return seconds

    def _clock_times(self) -> tuple[ThreadTimes, float]:
        """The thread's times, and seconds of processor time of the process."""
        return (self._clock.times(), time.process_time()) if self._clock is not None else (NO_TIMES, 0.0)

    def close(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = min(max(self._limit / SAMPLES_PER_LIMIT, SHORTEST_PAUSE), LONGEST_PAUSE)
        looked = slept = time.perf_counter()
        while not self._stopped.wait(pause):
            began, now = self._began, time.perf_counter()
            is_late, slept = now - slept > pause + LATE, now
            if self._seen is None and time.perf_counter() - looked > OLDEST_LOOK:
                self._before_turn = sight_before()
                looked = time.perf_counter()
            if began is None or self._seen is not None or time.perf_counter() - began + self._before <= self._limit:
                continue
            found = replace(sight_of(self._ident, self.request), is_late=is_late)
            if self._began == began:  # still the same turn
                self._seen = found
        if self._clock is not None:
            self._clock.close()


def _lines_of(frame: FrameType | None) -> tuple[str, ...]:
    """The innermost frames of a stack, the last innermost."""
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:
        code = frame.f_code
        lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(reversed(lines))
