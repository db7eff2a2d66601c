"""The bytes of an answer and the number of writes that carry them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from tessera.app.http.counts import HttpCounts
from tessera.app.server.connection import MAX_PIECE, BoundedConnection
from tessera.app.server.connection_limit import ConnectionLimit
from tessera.engine.contract.passes.pass_queue import PassQueue

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
HEAD = {"type": "http.response.start", "status": 200, "headers": []}

Answer = Callable[[Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


class WrittenTransport(asyncio.Transport):
    """Keeps what is written, piece by piece."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.pieces.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def written_by(*answers: Answer, method: bytes = b"GET") -> list[bytes]:
    """The pieces that one connection writes for as many requests, all sent at once."""
    waiting, done = list(answers), asyncio.Semaphore(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await waiting.pop(0)(send)
        done.release()

    config = Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
    config.load()
    limit = ConnectionLimit(4, HttpCounts(["/"], models=()))
    connection = BoundedConnection(
        config,
        ServerState(),
        {},
        head_timeout=60.0,
        limit=limit,
        reads=PassQueue(BoundedConnection.read_later, 1.0, 64, 64),
    )
    transport = WrittenTransport()
    connection.connection_made(transport)
    connection.data_received(REQUEST.replace(b"GET", method) * len(answers))
    for _ in answers:
        await asyncio.wait_for(done.acquire(), 30)
    await asyncio.sleep(0)
    connection.connection_lost(None)
    return transport.pieces


def body(text: bytes, more_body: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more_body}


async def stream(send: Any) -> None:
    await send(HEAD)
    await send(body(b"one", True))
    await send(body(b"two", True))
    await send(body(b"", False))


def test_a_head_goes_out_with_the_first_piece_of_its_body() -> None:
    first, second, end = asyncio.run(written_by(stream))
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert (second, end) == (b"3\r\ntwo\r\n", b"0\r\n\r\n")


def test_a_head_waits_for_nothing_that_is_not_there() -> None:
    seen: list[int] = []

    async def late(send: Any) -> None:
        await send(HEAD)
        for _ in range(3):
            await asyncio.sleep(0)
        seen.append(1)
        await send(body(b"one", False))

    head, rest = asyncio.run(written_by(late))
    assert head.endswith(b"\r\n\r\n")
    assert b"one" not in head
    assert rest.startswith(b"3\r\none\r\n")


def test_a_head_without_a_body_and_answers_to_requests_sent_ahead() -> None:
    async def whole(send: Any) -> None:
        await send({**HEAD, "headers": [(b"content-length", b"2")]})
        await send(body(b"ok", False))

    pieces = asyncio.run(written_by(whole, stream, whole, method=b"HEAD"))
    assert [piece.count(b"HTTP/1.1 200 OK") for piece in pieces] == [1, 1, 1]
    assert all(piece.endswith(b"\r\n\r\n") for piece in pieces)
    pieces = asyncio.run(written_by(whole, stream, whole))
    assert b"".join(pieces).count(b"HTTP/1.1 200 OK") == 3
    assert pieces[0].endswith(b"\r\n\r\nok")


def test_fault_fairness_what_hundreds_of_connections_receive_is_read_in_several_passes() -> None:
    """In the order of its arrival, and whole: what came later, and to the same connection, behind what came first."""
    num_connections, least = 20, 4
    by_pass: list[list[str]] = [[]]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        by_pass[-1].append(scope["path"])
        message = await receive()
        assert message["body"] == b"ab"
        await send(HEAD)
        await send(body(b"", False))

    async def main() -> None:
        config = Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
        config.load()
        limit = ConnectionLimit(64, HttpCounts(["/"], models=()))
        reads = PassQueue(BoundedConnection.read_later, 1e-9, least, least)
        connections = []
        for number in range(num_connections):
            connection = BoundedConnection(config, ServerState(), {}, head_timeout=60.0, limit=limit, reads=reads)
            connection.connection_made(WrittenTransport())
            head = f"POST /{number} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n".encode()
            connection.data_received(head[:20])
            connection.data_received(head[20:] + b"ab")
            connections.append(connection)
        connections[-1].transport.close()
        for _ in range(2 * num_connections):
            await asyncio.sleep(0)
            by_pass.append([])
        for connection in connections:
            connection.connection_lost(None)

    asyncio.run(main())
    assert [path for paths in by_pass for path in paths] == [f"/{number}" for number in range(num_connections - 1)]
    assert max(map(len, by_pass)) <= least


def received_by(app: Any, data: bytes, num_passes: int) -> tuple[list[bytes], float]:
    """What one connection writes after it has received `data` at once, and the longest time of a pass of the loop."""
    longest = 0.0

    async def main() -> list[bytes]:
        nonlocal longest
        config = Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
        config.load()
        limit = ConnectionLimit(4, HttpCounts(["/"], models=()))
        reads = PassQueue(BoundedConnection.read_later, 0.002, 16, 64)
        connection = BoundedConnection(config, ServerState(), {}, head_timeout=60.0, limit=limit, reads=reads)
        transport = WrittenTransport()
        connection.connection_made(transport)
        asyncio.get_running_loop().call_soon(connection.data_received, data)
        for _ in range(num_passes):
            begin = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begin)
        connection.connection_lost(None)
        return transport.pieces

    return asyncio.run(main()), longest


@pytest.mark.parametrize(
    "data",
    [REQUEST * 3, CHUNKED, CHUNKED + b"1;" + b"x" * 90_000],
    ids=["sent ahead", "a body that does not come", "a body that is refused"],
)
def test_every_request_is_told_that_its_connection_has_ended(data: bytes) -> None:
    """What it writes then would be an error of the closed transport."""
    transport = WrittenTransport()
    seen: list[str] = []
    num_pieces: list[int] = []  # of a refusal
    has_ended = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message["type"] == "http.request":
            message = await receive()
        seen.append(message["type"])
        while not has_ended:
            await asyncio.sleep(0)
        await send(HEAD)
        await send(body(b"late", False))
        seen.append("sent")

    async def main() -> None:
        nonlocal has_ended
        config = Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
        config.load()
        limit = ConnectionLimit(4, HttpCounts(["/"], models=()))
        reads = PassQueue(BoundedConnection.read_later, 1.0, 64, 64)
        connection = BoundedConnection(config, ServerState(), {}, head_timeout=60.0, limit=limit, reads=reads)
        connection.connection_made(transport)
        connection.data_received(data)
        num_pieces.append(len(transport.pieces))
        await asyncio.sleep(0)
        transport.close()
        connection.connection_lost(None)
        has_ended = True
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert seen == ["http.disconnect", "sent"]
    assert [len(transport.pieces)] == num_pieces


READ_AT_ONCE = 2**18  # bytes, of a socket


def test_fault_stalls_what_one_connection_receives_is_parsed_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 KiB of chunks of one byte, which a socket has at once, took 40 ms."""
    monkeypatch.setattr("tessera.app.server.connection.PIECES_SECONDS", 0.0)
    bodies: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            bodies.append(len(message["body"]))
            more = message["more_body"]
        await send(HEAD)
        await send(body(b"", False))

    count = READ_AT_ONCE // 6
    data = CHUNKED + b"1\r\na\r\n" * count + b"0\r\n\r\n"
    pieces, _ = received_by(app, data, 3 * len(data) // MAX_PIECE)
    assert sum(bodies) == count
    assert len(bodies) > len(data) // MAX_PIECE // 2
    assert max(bodies) <= 2 * MAX_PIECE // 6
    assert pieces[0].startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\n", b"a:\r\n"),
        (b"", b"GET / HTTP/1.1\r\nhost:\r\n\r\n"),
        (b"", b"POST / HTTP/1.1\r\nhost:\r\ncontent-length:1\r\n\r\na"),
        (CHUNKED, b"1\r\na\r\n"),
        (CHUNKED + b"0\r\n", b"a:\r\n"),
    ],
    ids=["fields", "requests", "requests with bodies", "chunks", "trailer fields"],
)
def test_fault_stalls_the_shortest_lines_hold_up_no_pass_of_the_loop(start: bytes, piece: bytes) -> None:
    """256 KiB of them took 16 to 55 ms."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    data = start + piece * (READ_AT_ONCE // len(piece))
    assert min(received_by(app, data, 100)[1] for _ in range(3)) < 0.01
