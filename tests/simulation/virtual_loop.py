"""An event loop without sockets or threads, whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

START = 1000.0  # seconds
MAX_SECONDS = 3600.0  # of a history; the longest takes a quarter of it
MAX_TURNS = 10_000  # of the loop at one time


class VirtualLoop(asyncio.BaseEventLoop):
    """What happens when is decided by the timers alone. Readers are called by `signal`.

    Raises AssertionError where nothing can happen any more, and beyond MAX_SECONDS or MAX_TURNS.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self._num_turns = 0  # at this time
        self._selector = self
        self._clock_resolution = 1e-7
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        """In place of a selector's."""
        assert timeout is not None, "everything waits for something that never comes"
        self._num_turns = 0 if timeout > 0 else self._num_turns + 1
        if self._num_turns == MAX_TURNS:
            self._num_turns = 0  # tasks that are cancelled afterwards have turns to end in
            raise AssertionError("callbacks follow each other without end")
        self.now += timeout
        assert self.now < START + MAX_SECONDS, "the history has no end"
        return []

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = callback, args

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        """Something can be read."""
        if fd in self._readers:
            callback, args = self._readers[fd]
            self.call_soon(callback, *args)

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
