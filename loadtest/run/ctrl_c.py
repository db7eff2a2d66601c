"""What Ctrl-C does while a run is under way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at the first Ctrl-C in place of raising KeyboardInterrupt, which could tear a message in two.

    A second one raises. Only the main thread can be told of signals; in others this does nothing.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()

    with _handler(handle):
        yield


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """A process started within ignores Ctrl-C from its first moment on; the terminal sends it to all of them."""
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
