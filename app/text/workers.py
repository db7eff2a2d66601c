"""Threads for what is too long for the event loop: rendering templates, encoding texts. Bounded both ways."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tessera.engine.contract.errors import EngineUnavailableError, QueueFullError

T = TypeVar("T")


class TextWorkers:
    """At most `num_threads` jobs run and `max_jobs` exist; a job given up on keeps its place until it ends."""

    def __init__(self, num_threads: int, max_jobs: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._places = threading.BoundedSemaphore(max_jobs)

    async def run(self, job: Callable[..., T], *args: Any, timeout: float, **kwargs: Any) -> T:
        """`job(*args, **kwargs)` in a thread.

        Raises:
            QueueFullError: too many jobs are waiting.
            EngineUnavailableError: no result within `timeout` seconds.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFullError("Too many prompts are waiting to be prepared.")
        future = self._pool.submit(job, *args, **kwargs)
        future.add_done_callback(self._give_place_back)
        waiting = asyncio.wrap_future(future)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the result.
            await asyncio.wait({waiting}, timeout=timeout)
            if not waiting.done():
                raise EngineUnavailableError("The server is too busy to prepare this prompt.")
            return waiting.result()
        finally:
            waiting.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _give_place_back(self, future: Future[Any]) -> None:
        self._places.release()
