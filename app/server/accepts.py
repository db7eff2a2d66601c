"""Connections that wait to be accepted: several are taken in one pass of a busy event loop.

uvloop accepts one connection in each pass. Behind hundreds of others a connection would wait for as many passes,
whoever sent it, and each pass of a busy loop takes milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

SECONDS_PER_ACCEPT = 0.0002  # of a pass: one more connection is taken for each; an idle loop takes them one by one
MAX_ACCEPTS = 32  # in one pass, as far as they take no longer than
ACCEPT_SECONDS = 0.002  # while clients of the same machine connect, the kernel may do their part in it as well

MakeProtocol = Callable[[], asyncio.BaseProtocol]


class Accepts:
    """Takes what has come to a listener while the event loop was busy.

    Idle processes that listen as well are faster, and so each gets its share of the connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: MakeProtocol,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        """`options`: of `connect_accepted_socket`."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the first connection of this pass was accepted
        self._tasks: set[asyncio.Task[None]] = set()

    def make_protocol(self) -> asyncio.BaseProtocol:
        """For one that the loop has accepted."""
        if self._since is None:
            self._since = time.perf_counter()
            self._loop.call_soon(self._accept_more)
        return self._make_protocol()

    def _accept_more(self) -> None:
        assert self._since is not None, "a connection was accepted in the last pass"
        begin = time.perf_counter()
        seconds, self._since = begin - self._since, None
        for _ in range(min(int(seconds / SECONDS_PER_ACCEPT), MAX_ACCEPTS)):
            if time.perf_counter() - begin > ACCEPT_SECONDS:
                return
            try:
                connection, _address = self._listener.accept()
            except OSError:  # there are no more, or no descriptors for them, which the loop sees as well
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or speaks no TLS
            await cast(Any, self._loop).connect_accepted_socket(
                self.make_protocol, connection, ssl=self._tls, **self._options
            )
