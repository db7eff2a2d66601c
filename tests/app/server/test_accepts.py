"""Connections that come while the event loop is busy."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
import uvloop

from tessera.app.server.accepts import MAX_ACCEPTS, SECONDS_PER_ACCEPT, Accepts

NUM_CLIENTS = 3 * MAX_ACCEPTS


async def passes_until_accepted(listener: socket.socket, pass_seconds: float) -> int:
    """How many passes of a loop, each of which takes so long, until all of `NUM_CLIENTS` have been accepted."""
    made = 0

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal made
            made += 1

    loop = asyncio.get_running_loop()
    accepts = Accepts(listener, Protocol)
    server = await loop.create_server(accepts.make_protocol, sock=listener)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(NUM_CLIENTS)]
    num_passes = 0
    while made < NUM_CLIENTS:
        num_passes += 1
        time.sleep(pass_seconds)
        await asyncio.sleep(0)
    for client in clients:
        client.close()
    server.close()
    for _ in range(4):
        await asyncio.sleep(0)
    assert not accepts._tasks, "those that have ended are forgotten"
    return num_passes


def test_fault_fairness_a_busy_event_loop_accepts_many_connections_in_a_pass() -> None:
    """uvloop takes one: a key's hundreds of connections held up another key's for as many passes."""
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_CLIENTS) as listener:
        listener.setblocking(False)
        num_passes = uvloop.run(passes_until_accepted(listener, MAX_ACCEPTS * SECONDS_PER_ACCEPT))
    assert num_passes <= NUM_CLIENTS / 4


def test_accepts_that_take_long_are_spread_over_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.app.server.accepts.ACCEPT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_CLIENTS) as listener:
        listener.setblocking(False)
        num_passes = uvloop.run(passes_until_accepted(listener, MAX_ACCEPTS * SECONDS_PER_ACCEPT))
    assert num_passes > NUM_CLIENTS / 2


def test_a_listener_without_more_connections_is_left_alone() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            accepts = Accepts(listener, asyncio.Protocol)
            accepts.make_protocol()
            time.sleep(MAX_ACCEPTS * SECONDS_PER_ACCEPT)
            await asyncio.sleep(0)
            assert not accepts._tasks
            listener.close()
            accepts.make_protocol()
            time.sleep(MAX_ACCEPTS * SECONDS_PER_ACCEPT)
            await asyncio.sleep(0)  # no descriptors, say: the loop sees it as well

    uvloop.run(main())


def test_a_client_that_has_left_before_its_connection_is_made_is_forgotten() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            accepts = Accepts(listener, asyncio.Protocol)

            async def fail(*arguments: object, **options: object) -> None:
                raise ConnectionResetError

            accepts._loop = type("Loop", (), {"connect_accepted_socket": staticmethod(fail)})()
            with socket.socket() as connection:
                await accepts._connect(connection)

    asyncio.run(main())
