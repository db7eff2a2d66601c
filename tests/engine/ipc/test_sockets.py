"""Messages between processes: cut out of a stream, kept for who reads slowly, and what happens when one side goes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.engine.ipc.sockets import connection as connection_module
from tessera.engine.ipc.sockets import listener as listener_module
from tessera.engine.ipc.sockets.connection import Connection, send_once
from tessera.engine.ipc.sockets.frames import HEADER, MAX_BYTES, FrameError, FrameReader
from tessera.engine.ipc.sockets.listener import Listener
from tests.support.servers.blocking_client import BlockingClient

DEADLINE = 20.0  # seconds; only a failing test waits this long
LARGE = 5 * 2**20  # bytes; many times what a socket holds


@pytest.fixture(autouse=True)
def sockets_keep_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the system allows."""
    for module in (listener_module, connection_module):
        monkeypatch.setattr(module, "SEND_BUFFER", 2**16)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def listener(path: str) -> Iterator[Listener]:
    listener = Listener(path)
    yield listener
    listener.close()


def connected(listener: Listener, path: str) -> tuple[bytes, BlockingClient]:
    """A client, and the name that the listener has for it."""
    client = BlockingClient(path, DEADLINE)
    client.send(b"hello")
    name, message = received(listener)
    assert message == b"hello"
    return name, client


def received(listener: Listener) -> tuple[bytes, bytes]:
    while (found := listener.receive()) is None:
        listener.wait(0.0, DEADLINE)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_the_same_however_the_stream_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    messages = [rng.randbytes(rng.choice((0, 1, 3, 300, 5000))) for _ in range(50)]
    stream = b"".join(HEADER.pack(len(message)) + message for message in messages)
    reader, found, start = FrameReader(), [], 0
    while start < len(stream):
        end = start + rng.choice((1, 2, 7, 400, 20_000))
        found += reader.feed(memoryview(stream)[start:end])
        start = end
    assert found == messages


def test_a_length_that_cannot_be_is_an_error() -> None:
    with pytest.raises(FrameError, match=f"{MAX_BYTES + 1} bytes"):
        FrameReader().feed(memoryview(HEADER.pack(MAX_BYTES + 1)))


def test_clients_have_names_of_their_own_and_get_what_is_sent_to_them(listener: Listener, path: str) -> None:
    clients = dict(connected(listener, path) for _ in range(3))
    assert len(clients) == 3
    for name in clients:
        assert listener.send(name, b"for " + name)
    listener.send_to_all(b"for all")
    for name, client in clients.items():
        assert [client.receive(), client.receive()] == [b"for " + name, b"for all"]
        client.close()


def test_large_messages_go_both_ways(listener: Listener, path: str) -> None:
    name, client = connected(listener, path)
    large = random.Random(0).randbytes(LARGE)
    sender = threading.Thread(target=client.send, args=(large,))
    sender.start()
    assert received(listener) == (name, large)
    sender.join()
    assert listener.send(name, large)
    assert listener.send(name, b"after it")
    assert [client.receive(), client.receive()] == [large, b"after it"]
    client.close()


def test_what_a_client_has_not_read_keeps_its_order_and_holds_up_no_other(listener: Listener, path: str) -> None:
    slow_name, slow = connected(listener, path)
    name, client = connected(listener, path)
    for number in range(100):
        assert listener.send(slow_name, b"%d" % number + bytes(2**17))
        assert listener.send(name, b"%d" % number)
        assert client.receive() == b"%d" % number
    assert [slow.receive().rstrip(b"\0") for _ in range(100)] == [b"%d" % number for number in range(100)]
    slow.close()
    client.close()


def test_a_client_that_leaves_too_much_unread_counts_as_gone(
    listener: Listener, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNSENT", 2**20)
    name, client = connected(listener, path)
    assert not all(listener.send(name, bytes(2**18)) for _ in range(10))
    assert not listener.send(name, b"more")
    client.close()


def test_a_client_that_has_gone_is_sent_nothing(listener: Listener, path: str) -> None:
    name, client = connected(listener, path)
    client.close()
    other, there = connected(listener, path)
    assert not listener.send(name, b"too late")
    assert listener.send(other, b"in time")
    assert there.receive() == b"in time"
    there.close()


def test_closing_waits_for_what_is_unsent(path: str) -> None:
    listener = Listener(path)
    name, client = connected(listener, path)
    assert listener.send(name, bytes(LARGE))
    closing = threading.Thread(target=listener.close, args=(DEADLINE,))
    closing.start()
    assert client.receive() == bytes(LARGE)
    closing.join()
    with pytest.raises(ConnectionResetError):
        client.receive()
    client.close()


def test_what_is_no_message_ends_its_connection_alone(
    listener: Listener, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, wrong = connected(listener, path)
    other, right = connected(listener, path)
    wrong._socket.sendall(HEADER.pack(MAX_BYTES + 1))
    right.send(b"a message")
    assert received(listener) == (other, b"a message")
    while listener.send(name, b""):
        listener.wait(0.0, DEADLINE)
        assert listener.receive() is None
    assert "a client's connection is closed: a message of" in caplog.text
    wrong.close()
    right.close()


def test_where_descriptors_are_short_connections_wait(listener: Listener, path: str) -> None:
    """And the listener does not ask for them all the time meanwhile."""
    own = listener._socket
    asked = []

    def accept() -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return own.accept()

    listener._socket = SimpleNamespace(accept=accept, fileno=own.fileno, close=own.close)  # type: ignore[assignment]
    name, client = connected(listener, path)
    assert (name, len(asked)) == (b"1", 2)
    client.close()


def test_a_thread_that_has_just_worked_looks_before_it_sleeps(listener: Listener) -> None:
    """It asks again and again without waiting, and only then lets itself be woken."""
    asked: list[float | None] = []

    class Epoll:
        def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
            asked.append(timeout)
            return [] if timeout == 0 else [(3, 1)]

        def close(self) -> None: ...

    listener._epoll.close()
    listener._epoll = Epoll()  # type: ignore[assignment]
    listener.wait(0.001)
    assert len(asked) > 1
    assert asked[:-1] == [0] * (len(asked) - 1)
    assert asked[-1] is None
    asked.clear()
    listener.wait(0.0)
    assert asked == [None]


def in_a_loop(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))


class Receiver:
    """A connection whose messages are awaited."""

    def __init__(self, path: str) -> None:
        self._changed = asyncio.Event()
        self.connection = Connection(path, self._changed.set)

    async def receive(self) -> bytes | None:
        """None when the server has gone."""
        while not self.connection.received:
            if self.connection.is_lost:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self.connection.received.popleft()


def test_a_server_may_come_up_later_and_hears_what_was_sent_before(path: str) -> None:
    async def test() -> None:
        receiver = Receiver(path)
        receiver.connection.send(b"hello")
        await asyncio.sleep(0)
        with contextlib.closing(Listener(path)) as listener:
            while (found := listener.receive()) is None:
                await asyncio.sleep(0.001)
            assert found == (b"1", b"hello")
            listener.send(b"1", b"welcome")
            assert await receiver.receive() == b"welcome"
        assert await receiver.receive() is None
        receiver.connection.send(b"this is lost")
        receiver.connection.close()
        receiver.connection.send(b"nor this")

    in_a_loop(test)


def test_what_a_server_sent_before_it_ended_arrives(path: str) -> None:
    """Also what is still in the socket when its end is noticed otherwise."""

    async def test() -> None:
        listener = Listener(path)
        receiver = Receiver(path)
        receiver.connection.send(b"hello")
        await asyncio.sleep(0)
        assert received(listener) == (b"1", b"hello")
        for number in range(100):
            assert listener.send(b"1", b"%d" % number)
        receiver.connection.send(b"not read any more")
        listener.close()
        assert list(receiver.connection.take_rest()) == [b"%d" % number for number in range(100)]
        assert receiver.connection.is_lost
        receiver.connection.close()

    in_a_loop(test)


def test_an_event_loop_sends_and_receives_large_messages(listener: Listener, path: str) -> None:
    large = random.Random(1).randbytes(LARGE)

    def answer() -> None:
        for _ in range(2):
            name, message = received(listener)
            listener.send(name, message)

    async def test() -> None:
        receiver = Receiver(path)
        receiver.connection.send(large)
        receiver.connection.send(b"after it")
        assert await receiver.receive() == large
        assert await receiver.receive() == b"after it"
        receiver.connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    in_a_loop(test)
    thread.join()


def test_one_message_needs_no_connection_kept(listener: Listener, path: str) -> None:
    send_once(path, b"an order")
    assert received(listener)[1] == b"an order"
    with pytest.raises(FileNotFoundError):
        send_once(path + "absent", b"an order")
