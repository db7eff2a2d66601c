"""A client's end of a connection, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from tessera.engine.ipc.sockets.frames import HEADER, READ_BYTES, SEND_BUFFER, FrameError, FrameReader
from tessera.engine.ipc.sockets.outgoing import Outgoing

FIRST_RETRY, LAST_RETRY = 0.01, 0.1  # seconds until a server that does not listen yet is looked for again


class Connection:
    """Messages to a server and from it, in order; the server may come up later.

    Attributes:
        received: messages that `on_received` has not taken yet.
        is_lost: the server has gone, and nothing comes after `received`.
        is_closed: by this side.

    Args:
        path: where the server listens.
        on_received: called in the event loop when there are messages, or when the connection is lost.

    Raises:
        OSError: descriptors are short.
    """

    def __init__(self, path: str, on_received: Callable[[], object]) -> None:
        self.received: deque[bytes] = deque()
        self.is_lost = self.is_closed = False
        self._path = path
        self._on_received = on_received
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._outgoing = Outgoing()
        self._is_connected = False
        self._retry = FIRST_RETRY
        self._timer: asyncio.TimerHandle | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._connect()

    def send(self, payload: bytes) -> None:
        """Returns at once; what is sent to a server that has gone is lost."""
        if self.is_closed or self.is_lost:
            return
        if not self._is_connected:
            self._outgoing.keep(payload)
            return
        with contextlib.suppress(OSError):  # reading tells
            self._outgoing.send(self._socket, payload)
            if self._outgoing:
                self._loop.add_writer(self._socket.fileno(), self._write)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_watching()
        self._socket.close()

    def _connect(self) -> None:
        try:
            self._socket.connect(self._path)
        except OSError:  # there is none yet, or it has died, or its queue is full
            self._timer = self._loop.call_later(self._retry, self._connect)
            self._retry = min(2 * self._retry, LAST_RETRY)
            return
        self._is_connected = True
        self._loop.add_reader(self._socket.fileno(), self.read)
        if self._outgoing:
            self._loop.add_writer(self._socket.fileno(), self._write)
            self._write()

    def read(self) -> None:
        """Take what has come; the event loop does so by itself."""
        # Where there are messages already, the receiver comes back to them.
        if not self.received and self._fill():
            self._on_received()

    def take_rest(self) -> deque[bytes]:
        """All messages that have come, which are the receiver's last."""
        while self._fill():
            pass
        return self.received

    def _fill(self) -> bool:
        """-> whether anything has come, the connection's loss included."""
        if not self._is_connected:
            return False
        try:
            self.received.extend(self._reader.receive(self._socket, self._scratch))
        except BlockingIOError:
            return False
        except (OSError, FrameError):
            self.is_lost = True
            self._stop_watching()
        return True

    def _write(self) -> None:
        try:
            self._outgoing.send_kept(self._socket)
        except OSError:  # reading tells
            self._outgoing.clear()
        if not self._outgoing:
            self._loop.remove_writer(self._socket.fileno())

    def _stop_watching(self) -> None:
        if self._is_connected:
            self._is_connected = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())


def send_once(path: str, payload: bytes) -> None:
    """Send one short message to a server that listens.

    Raises:
        OSError: it does not, or descriptors are short.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sender:
        sender.setblocking(False)  # a short message fits into the socket's buffer
        sender.connect(path)
        sender.sendall(HEADER.pack(len(payload)) + payload)
