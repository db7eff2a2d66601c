"""Examples without end, made by worker processes while others are learnt."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType

from tessera.engine.training.examples import Example

AHEAD = 3  # batches a worker


class ExampleStream:
    """Batches by step, in any number of processes the same ones.

    Args:
        make: a step's examples, which depend on its arguments' step alone; it is sent to the processes.
        digest: equal for equal streams.
        num_workers: processes; 0 makes batches where they are used.
    """

    def __init__(self, make: Callable[[int], list[Example]], digest: str, num_workers: int) -> None:
        self.digest = digest
        self._make = make
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._coming: deque[tuple[int, Future[list[Example]]]] = deque()

    def __enter__(self) -> ExampleStream:
        if self._num_workers:
            # Not forked: a process with a GPU's context has threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._num_workers, mp_context=context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._coming.clear()

    def batch(self, step: int) -> list[Example]:
        """Waits for it; steps that are asked for in turn are made beforehand."""
        if self._pool is None:
            return self._make(step)
        if self._coming and self._coming[0][0] != step:
            for _, future in self._coming:
                future.cancel()
            self._coming.clear()
        following = self._coming[-1][0] + 1 if self._coming else step
        for number in range(following, step + AHEAD * self._num_workers):
            self._coming.append((number, self._pool.submit(self._make, number)))
        return self._coming.popleft()[1].result()
