"""The order in which grammars are compiled: first those of the account on which the least time was spent."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from tessera.engine.contract.errors import QueueFullError

MAX_PENDING = 256  # grammars of one account that wait to be compiled
MAX_ACCOUNTS = 4096  # without grammars, whose times are remembered


class Job(Protocol):
    """`future` is pending until the job is taken."""

    @property
    def future(self) -> Future[Any]: ...


J = TypeVar("J", bound=Job)


class CompileShares(Generic[J]):
    """Jobs that wait, by account. Thread-safe.

    An account that comes back after a pause starts level with the least of those that have jobs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, deque[J]] = {}
        self._seconds: dict[int, float] = {}

    def enqueue(self, job: J, account_id: int) -> None:
        """Queue a job, also one that waits for another account already: it is begun at the earlier turn.

        Raises:
            QueueFullError: as many of the account's jobs wait as may.
        """
        with self._lock:
            own = self._pending.setdefault(account_id, deque())
            if len(own) >= MAX_PENDING:
                own = self._pending[account_id] = deque(each for each in own if not each.future.done())
            if len(own) >= MAX_PENDING:
                raise QueueFullError(f"{len(own)} grammars are waiting to be compiled already; try again later")
            if not own:
                least = min(
                    (self._seconds.get(other, 0.0) for other in self._pending if other != account_id), default=0.0
                )
                self._forget_some()
                self._seconds[account_id] = max(self._seconds.get(account_id, 0.0), least)
            if job not in own:
                own.append(job)

    def take(self) -> tuple[J, int] | None:
        """The next job, whose future runs from now on, and its account; None where no job is left."""
        with self._lock:
            while self._pending:
                account_id = min(self._pending, key=lambda each: self._seconds.get(each, 0.0))
                own = self._pending[account_id]
                job = own.popleft() if own else None
                if not own:
                    del self._pending[account_id]
                if job is None or job.future.running() or job.future.done():
                    continue  # begun for another account, or given up
                if job.future.set_running_or_notify_cancel():
                    return job, account_id
        return None

    def charge(self, account_id: int, seconds: float) -> None:
        with self._lock:
            self._seconds[account_id] = self._seconds.get(account_id, 0.0) + seconds

    def _forget_some(self) -> None:
        if len(self._seconds) > MAX_ACCOUNTS:
            self._seconds = {each: self._seconds.get(each, 0.0) for each in self._pending}
