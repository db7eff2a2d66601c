"""Where ranks wait for one another on the host; a rank that failed or hangs ends all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from tessera.engine.contract.errors import RankError

LOOK_SECONDS = 0.5  # between two looks at ranks that are late
NOTE_SECONDS = 10.0  # between two log lines of a rank that waits patiently
BUSY_SHARE = 0.05  # of the time between two looks that a rank's thread must have computed not to hang

logger = logging.getLogger("tessera.engine")

T = TypeVar("T")


@dataclass
class RankState:
    """What others see of a rank."""

    clock: int | None = None  # of its thread's CPU time
    stage: str = "its start"  # what it does, for the log
    arrivals: int = 0
    wait_seconds: float = 0.0  # for the others
    steps: int = 0


@dataclass
class Rendezvous:
    """Ranks come, each from its own thread, and go on when all are there.

    Attributes:
        timeout: seconds after which a rank is late that neither comes nor computes.
        on_hang: told the error when a rank is late, in the thread of another: the late one cannot be told.
        on_failure: called when a rank has failed or is late, in whichever thread noticed.
    """

    size: int
    timeout: float
    on_hang: Callable[[RankError], None] = lambda error: None
    on_failure: Callable[[], None] = lambda: None
    states: list[RankState] = field(init=False)

    def __post_init__(self) -> None:
        self.states = [RankState() for _ in range(self.size)]
        self._changed = threading.Condition()
        self._rounds = 0
        self._shown: list[object] = [None] * self.size
        self._error: RankError | None = None

    def begin(self, index: int) -> None:
        """The calling thread is this rank's from now on."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)  # not everywhere: then a rank may not take long
        self.states[index].clock = clock_of(threading.get_ident()) if clock_of is not None else None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def fail(self, index: int, cause: BaseException) -> None:
        """Rank `index` will not come any more."""
        with self._changed:
            if self._error is None:
                self._error = RankError(f"rank {index} failed: {type(cause).__name__}: {cause}")
            self._changed.notify_all()
        self.on_failure()

    def wait(self, index: int, *, patient: bool = False) -> None:
        """Return when all ranks are here; `patient`: however long that takes.

        Raises: RankError.
        """
        state, begun = self.states[index], time.monotonic()
        with self._changed:
            self._raise_error()
            state.arrivals += 1
            target = self._rounds + 1
            if all(other.arrivals == target for other in self.states):
                self._rounds = target
                self._changed.notify_all()
                return
            watch = None if patient else _Watch(self.timeout)
            noted = begun
            while self._rounds < target:
                came = self._changed.wait(LOOK_SECONDS)
                self._raise_error()
                if self._rounds >= target or came:
                    continue
                late = [number for number, other in enumerate(self.states) if other.arrivals < target]
                if watch is None:
                    if time.monotonic() - noted >= NOTE_SECONDS:
                        noted = time.monotonic()
                        self._note(index, late, noted - begun)
                    continue
                if watch.hangs([self.states[number].clock for number in late]):
                    self._error = RankError(f"rank {late[0]} has not come for {self.timeout:g} s")
                    self._changed.notify_all()
                    self.on_failure()
                    self.on_hang(self._error)
                    raise self._error
        state.wait_seconds += time.monotonic() - begun

    def exchange(self, index: int, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks; however long they take to come. Raises: RankError."""
        self._shown[index] = value
        self.wait(index, patient=True)
        found = cast(list[T], list(self._shown))
        self.wait(index, patient=True)
        return found

    def _note(self, index: int, late: list[int], seconds: float) -> None:
        others = ", ".join(f"rank {number} (at {self.states[number].stage})" for number in late)
        logger.info("rank %d (at %s) has waited %.0f s for %s", index, self.states[index].stage, seconds, others)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RankError(str(self._error))


class _Watch:
    """Looks at threads that are waited for."""

    def __init__(self, timeout: float) -> None:
        self._most_looks = max(round(timeout / LOOK_SECONDS) - 1, 1)  # after the first, which has nothing to compare
        self._idle_looks = 0  # not seconds: a machine that slept has looked once
        self._looked = time.monotonic()
        self._computed: dict[int, float] = {}  # by clock

    def hangs(self, clocks: list[int | None]) -> bool:
        """Whether one of these threads has computed nothing for so many looks in a row."""
        now, busy = time.monotonic(), True
        for clock in clocks:
            spent = time.clock_gettime(clock) if clock is not None else 0.0
            known = self._computed.get(clock or 0)
            busy = busy and (known is None or spent - known > BUSY_SHARE * (now - self._looked))
            self._computed[clock or 0] = spent
        self._looked = now
        self._idle_looks = 0 if busy else self._idle_looks + 1
        return self._idle_looks >= self._most_looks
