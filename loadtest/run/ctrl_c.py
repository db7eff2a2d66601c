"""Handling of Ctrl-C during a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at the first Ctrl-C instead of raising KeyboardInterrupt, which could cut a message in half.

    A second one raises. Only the main thread gets signals; in others this does nothing.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()

    with _handler(handle):
        yield


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes started within ignore Ctrl-C from the start; the terminal sends it to all processes."""
    with _handler(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handler(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
