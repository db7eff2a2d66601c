"""The text of GET /metrics: rendered at most so often, and once for all that ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tessera.engine.contract.errors import EngineUnavailableError

INTERVAL = 1.0  # seconds between two renderings on average
BURST = 10  # renderings that may follow each other at once after a quiet time
MAX_WAITING = 64  # scrapes that wait for a new text; others get the last one


class MetricsPage:
    """A text that is never older than its request, unless more ask than may wait."""

    def __init__(self, render: Callable[[], Awaitable[bytes]]) -> None:
        self._render = render
        self._text: bytes | None = None
        self._next: asyncio.Task[bytes] | None = None  # has not begun to render
        self._num_waiting = 0
        self._paid_until = 0.0  # each rendering moves it by INTERVAL

    async def text(self) -> bytes:
        """The metrics, after a wait of about INTERVAL where they are asked for more often than that."""
        if self._text is not None and self._num_waiting >= MAX_WAITING:
            return self._text
        if self._next is None:
            self._next = asyncio.create_task(self._render_in_time())
        self._num_waiting += 1
        try:
            return await asyncio.shield(self._next)
        finally:
            self._num_waiting -= 1

    async def _render_in_time(self) -> bytes:
        now = asyncio.get_running_loop().time()
        self._paid_until = max(self._paid_until, now - BURST * INTERVAL) + INTERVAL
        await asyncio.sleep(self._paid_until - now)
        self._next = None  # later scrapes must see later events, so they start another rendering
        self._text = await self._render()
        return self._text


class EngineText:
    """The engine's own metrics, or the last ones where it is busy; nothing while it is down.

    Args:
        ask: asks the engine; raises EngineUnavailableError.
        patience: seconds that an answer may take, but for the first.
    """

    def __init__(self, ask: Callable[[], Awaitable[bytes]], patience: float) -> None:
        self._ask = ask
        self._patience = patience
        self._text: bytes | None = None
        self._asking: asyncio.Task[bytes] | None = None

    async def latest(self) -> bytes:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_engine())
            self._asking.add_done_callback(self._forget)
        asking = self._asking
        await asyncio.wait({asking}, timeout=None if self._text is None else self._patience)
        return asking.result() if asking.done() else self._text or b""

    async def _ask_engine(self) -> bytes:
        try:
            self._text = await self._ask()
        except EngineUnavailableError:
            self._text = b""
        return self._text

    def _forget(self, _: asyncio.Task[bytes]) -> None:
        self._asking = None
