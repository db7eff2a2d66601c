"""Renders metrics beside the engine's steps: the text takes a millisecond, which every stream would wait for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("tessera.engine")


class MetricsThread:
    """Renders one text for all that have asked since the last one was begun.

    Args:
        render: called in the thread.
        wake_up: called in the thread once `take` has something.
    """

    def __init__(self, render: Callable[[], bytes], wake_up: Callable[[], None]) -> None:
        self._render = render
        self._wake_up = wake_up
        self._condition = threading.Condition()
        self._waiting: list[tuple[bytes, int]] = []
        self._done: deque[tuple[list[tuple[bytes, int]], bytes]] = deque()
        self._closed = False
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def ask(self, client: bytes, token: int) -> None:
        """Have a text rendered for this client's request."""
        with self._condition:
            self._waiting.append((client, token))
            self._condition.notify()

    def take(self) -> list[tuple[list[tuple[bytes, int]], bytes]]:
        """The texts that are ready, each with the clients and requests that it is for."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self) -> None:
        """Let the thread end."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                waiting, self._waiting = self._waiting, []
            try:
                text = self._render()
            except Exception:
                logger.exception("the metrics could not be rendered")
                continue
            self._done.append((waiting, text))
            self._wake_up()
