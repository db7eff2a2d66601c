"""Messages on their way into a socket that does not block."""

from __future__ import annotations

import socket
from collections import deque

from tessera.engine.ipc.sockets.frames import HEADER

WRITE_BYTES = 2**18  # given to a socket at once


class Outgoing:
    """Keeps what the socket does not take at once, in order. True while there is any.

    Attributes:
        num_bytes: so many are kept.
    """

    def __init__(self) -> None:
        self._kept: deque[memoryview] = deque()
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def send(self, to: socket.socket, payload: bytes) -> None:
        """Raises OSError if the other side is gone."""
        frame = (HEADER.pack(len(payload)), payload)
        try:
            sent = 0 if self._kept else to.sendmsg(frame)
        except BlockingIOError:
            sent = 0
        if sent < HEADER.size + len(payload):
            self._keep(memoryview(b"".join(frame))[sent:])

    def keep(self, payload: bytes) -> None:
        """For a socket that is not connected yet."""
        self._keep(memoryview(HEADER.pack(len(payload)) + payload))

    def send_kept(self, to: socket.socket) -> None:
        """As much as the socket takes now. Raises OSError if the other side is gone."""
        try:
            while self._kept:
                first = self._kept[0]
                sent = to.send(first[:WRITE_BYTES])
                self.num_bytes -= sent
                if sent == len(first):
                    self._kept.popleft()
                else:
                    self._kept[0] = first[sent:]
        except BlockingIOError:
            pass

    def clear(self) -> None:
        self._kept.clear()
        self.num_bytes = 0

    def _keep(self, rest: memoryview) -> None:
        self._kept.append(rest)
        self.num_bytes += len(rest)
