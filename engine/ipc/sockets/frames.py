"""Messages in a stream of bytes: each after its length."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("<I")  # the message's length in bytes
MAX_BYTES = 2**30  # of one message
READ_BYTES = 2**18  # taken from a socket at once
SEND_BUFFER = 2**22  # bytes kept for a receiver that is at work; the system may allow fewer


class FrameError(ValueError):
    """The bytes received are not a valid message."""


class FrameReader:
    """Cuts what has been received into messages, and keeps the beginning of the next."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def receive(self, source: socket.socket, scratch: memoryview) -> list[bytes]:
        """The messages that end with what the socket has, at most `len(scratch)` bytes.

        Raises:
            BlockingIOError: it has nothing now.
            OSError: the other side is gone.
            FrameError: a message is longer than MAX_BYTES.
        """
        size = source.recv_into(scratch)
        if size == 0:
            raise ConnectionResetError("the other side has closed the connection")
        return self.feed(scratch[:size])

    def feed(self, data: memoryview) -> list[bytes]:
        """The messages that end with `data`, in order.

        Raises:
            FrameError: a message is longer than MAX_BYTES.
        """
        rest = self._rest
        if not rest:
            frames, end = cut(data)
            rest += data[end:]
            return frames
        rest += data
        with memoryview(rest) as view:
            frames, end = cut(view)
        del rest[:end]
        return frames


def cut(data: memoryview) -> tuple[list[bytes], int]:
    """-> the whole messages at the beginning of `data`, and where they end."""
    frames = []
    start, size = 0, len(data)
    while size - start >= HEADER.size:
        (length,) = HEADER.unpack_from(data, start)
        if length > MAX_BYTES:
            raise FrameError(f"a message of {length} bytes; at most {MAX_BYTES} are allowed")
        end = start + HEADER.size + length
        if end > size:
            break
        frames.append(bytes(data[start + HEADER.size : end]))
        start = end
    return frames, start
