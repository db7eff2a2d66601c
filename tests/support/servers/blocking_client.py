"""A client of the engine process that waits for what it receives."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque

from tessera.engine.ipc.sockets.frames import HEADER, READ_BYTES, FrameReader

RETRY = 0.01  # seconds


class BlockingClient:
    """Raises TimeoutError, or ConnectionResetError where the other side has gone.

    Args:
        timeout: seconds for each message, and until the other side listens.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        end = time.monotonic() + timeout
        while not self._connects(path):
            if time.monotonic() > end:
                raise TimeoutError(f"no server listens at {path}")
            time.sleep(RETRY)
        self._reader = FrameReader()
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._received: deque[bytes] = deque()

    def _connects(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            self._socket.connect(path)
            return True
        return False

    def send(self, payload: bytes) -> None:
        self._socket.sendall(HEADER.pack(len(payload)) + payload)

    def receive(self) -> bytes:
        while not self._received:
            self._received.extend(self._reader.receive(self._socket, self._scratch))
        return self._received.popleft()

    def close(self) -> None:
        self._socket.close()
