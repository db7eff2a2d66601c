"""HTTP/1.1 as an attacker speaks it: fast, and free to send anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

TIMEOUT = 120.0  # seconds for an answer
MAX_LINE = 2**20


# What a connection raises that has ended; RuntimeError is uvloop's for a write to a closed one.
GONE = (OSError, EOFError, RuntimeError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError)


class NoAnswerError(Exception):
    """The connection ended, or the time was over, before an answer was complete."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_faulty(self) -> bool:
        """Status 5xx other than 503 with Retry-After."""
        return self.status >= 500 and not (self.status == 503 and "retry-after" in self.headers)


@dataclass(frozen=True)
class Wire:
    """Where a server listens."""

    host: str
    port: int

    async def connect(self) -> Connection:
        return Connection(*await asyncio.open_connection(self.host, self.port, limit=MAX_LINE))

    async def get(self, path: str, key: str = "") -> Answer:
        """One request on a connection of its own. Raises NoAnswerError, OSError."""
        connection = await self.connect()
        try:
            return await connection.ask(request_bytes("GET", path, b"", key))
        finally:
            connection.close()


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_open: bool = field(default=True)

    async def ask(self, request: bytes, timeout: float = TIMEOUT) -> Answer:
        """Raises NoAnswerError."""
        try:
            self.writer.write(request)
            return await asyncio.wait_for(self._read_answer(), timeout)
        except GONE as error:
            self.is_open = False
            raise NoAnswerError(repr(error)) from None

    async def _read_answer(self) -> Answer:
        status, headers = await self.read_head()
        if headers.get("transfer-encoding") == "chunked":
            body = await self._read_chunks()
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            self.is_open = False
        return Answer(status, headers, body)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(first.split(" ", 2)[1]), headers

    async def _read_chunks(self) -> bytes:
        pieces = []
        while size := int(await self.reader.readline(), 16):
            pieces.append((await self.reader.readexactly(size + 2))[:-2])
        await self.reader.readline()
        return b"".join(pieces)

    def close(self) -> None:
        self.is_open = False
        self.writer.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.is_open = False
        sock = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):  # it may be gone
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def request_bytes(method: str, path: str, body: bytes, key: str = "", extra: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    if body or method == "POST":
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return (head + extra + "\r\n").encode("utf-8", "surrogatepass") + body
