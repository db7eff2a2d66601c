"""An event loop on which waiting takes no time: its clock stands while there is work and jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE = 30.0  # real seconds for another thread to wake a loop that has nothing else to do


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """What happens when is the same on every run and every machine.

    `create_connection` reaches `serve`'s protocol through a socket pair, whose bytes are there once they are written.
    """

    def __init__(self, serve: Callable[[], asyncio.BaseProtocol]) -> None:
        self._serve = serve
        self._jumping = _JumpingSelector()
        self._executor = ThreadPoolExecutor(1)
        super().__init__(self._jumping)
        self.set_default_executor(self._executor)

    def time(self) -> float:
        return self._jumping.now

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        ours, theirs = socket.socketpair()
        await self.connect_accepted_socket(self._serve, theirs)
        return await super().create_connection(protocol_factory, sock=ours)

    def close(self) -> None:
        super().close()
        self._executor.shutdown()


class _JumpingSelector(selectors.BaseSelector):
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(PATIENCE if timeout is None else 0)
        assert ready or timeout is not None, "the loop waits for something that never comes"
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()
