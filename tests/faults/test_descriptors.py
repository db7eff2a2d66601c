"""Too few descriptors: connections without end, and deaths while there are none to be had."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tessera.app.http.counts import HttpCounts
from tessera.app.server.connection_limit import SPARE_PLACES, Connection, ConnectionLimit
from tessera.app.settings import MOST_CONNECTIONS
from tessera.app.sockets.descriptors import connection_limit
from tessera.engine.contract.errors import ConfigError
from tests.faults.raw_http import HEAD, TEXT, connect, read_to_the_end
from tests.support.fakes.fake_client import FakeClient, always
from tests.support.servers.http_fixtures import serve, settings_for, write_model_folder
from tests.support.servers.server_fixture import HEALTH_DEADLINE, running_server
from tests.support.servers.surface_fixtures import says

NONE_FREE = 3  # a limit below which only the standard streams have descriptors


def get(connection: socket.socket, path: str) -> str:
    """The body of a whole response, however many packets bring it."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    return response.read().decode()


def test_fault_descriptors_the_longest_idle_connection_makes_room(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), max_connections=4)
    with serve(says("ok"), settings) as url, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(url)) for _ in range(4)]
        for idle in (*connections[1:], connections[0]):  # each since its answer
            assert "version" in get(idle, "/version")
        assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200
        assert read_to_the_end(connections[1]) == b""
        assert "tessera:http_connections_dropped_total 1.0" in get(connections[0], "/metrics")


def test_fault_descriptors_health_is_answered_where_every_connection_is_busy(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), max_connections=2)
    client = FakeClient(always([]), hang=True)
    body = b'{"model": "tiny", "prompt": "hi"}'
    with serve(client, settings) as url, contextlib.ExitStack() as stack:
        for _ in range(2):
            client.submitted.clear()
            busy = stack.enter_context(connect(url))
            busy.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert client.submitted.wait(HEALTH_DEADLINE)
        for _ in range(SPARE_PLACES + 1):
            assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"]
        metrics = httpx.get(f"{url}/metrics").text
        assert "tessera:http_connections 3.0" in metrics
        assert "tessera:http_connections_dropped_total 1.0" in metrics
        assert not any(submission.aborted.is_set() for submission in client.submissions)


class Caller(Connection):
    transport: asyncio.Transport  # none is made

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_fault_descriptors_spare_places_are_few() -> None:
    limit = ConnectionLimit(2, HttpCounts([]))
    callers = [Caller() for _ in range(2 + SPARE_PLACES)]
    for index, caller in enumerate(callers):
        place = limit.enter(caller)
        assert place is not None
        assert place.is_spare == (index >= 2)
        limit.make_busy(caller)
    turned_away = Caller()
    assert limit.enter(turned_away) is None
    limit.leave(turned_away)
    limit.make_idle(callers[0])
    place = limit.enter(Caller())
    assert place is not None
    assert [caller.dropped for caller in callers] == [True] + [False] * (len(callers) - 1)


def test_fault_descriptors_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "from tessera.app.sockets.descriptors import raise_descriptor_limit as f; import resource;"
        " print(f(), resource.getrlimit(7))"
    )
    ulimit = ["bash", "-c", 'ulimit -Sn 100 && ulimit -Hn 700 && exec "$@"', "-"]
    found = subprocess.run([*ulimit, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert resource.RLIMIT_NOFILE == 7
    assert found.stdout.split() == ["700", "(700,", "700)"]


def test_fault_descriptors_connections_leave_some_for_the_rest() -> None:
    assert connection_limit(1024, None) == 768
    assert connection_limit(2**20, None) == MOST_CONNECTIONS
    assert connection_limit(100, None) == 50
    assert connection_limit(1024, 768) == 768
    with pytest.raises(ConfigError, match=r"--max-connections 769: .* has room for 768"):
        connection_limit(1024, 769)


def test_fault_descriptors_a_server_without_any_restarts_its_processes_later(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard - 1), hard))
        server = stack.enter_context(running_server(None, tmp_path / "log", "--api-workers", "2"))
        server.until(lambda: server.children("tessera.app.server.worker"), "the worker")
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert limits[0] == limits[1], "raised at the start"
        engine, (worker,) = server.engine_pid(), server.children("tessera.app.server.worker")
        assert engine is not None
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (NONE_FREE, limits[1]))
        for pid in (engine, worker):
            os.kill(pid, signal.SIGKILL)
        sentences = ("an app process could not be started", "could not be run", "cannot be connected to")
        server.until(lambda: all(sentence in server.log for sentence in sentences), "the failures of all")
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        server.until(lambda: server.engine_pid() not in (None, engine), "the engine's return")
        server.until(lambda: server.children("tessera.app.server.worker") not in ([], [worker]), "the worker's return")
        server.until(lambda: server.http.get("/health").status_code == 200, "health")
        assert server.post(server.body("hi", 4))["usage"]["completion_tokens"] == 4


def test_fault_descriptors_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    """More connections than the server has descriptors, none of which has a key, and the engine dies."""
    with running_server(None, tmp_path / "log", "--api-key", "right", "--max-connections", "8") as server:
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        in_use = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (in_use + 80, limits[1]))
        engine = server.engine_pid()
        assert engine is not None
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connect(server.url))
            os.kill(engine, signal.SIGKILL)
            server.until(lambda: server.engine_pid() not in (None, engine), "the engine's return")
            server.until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "health")
            headers = {"authorization": "Bearer right"}
            answer = httpx.post(f"{server.url}/v1/completions", json=server.body("hi", 4), headers=headers)
            assert answer.status_code == 200
