"""Reserved capacity: health and metrics are answered where the rest of the server is busy, full, or going down."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.server_fixture import DEADLINE, Server, running_server

KEY = "sk-test"
AT_ONCE = 2.0  # seconds, on a busy machine
PATHS = ("/health", "/ready", "/metrics", "/version", "/ping")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("admin") / "log"
    with running_server(None, log, "--admin-port", "0", "--api-key", KEY, "--max-connections", "4") as server:
        yield server


@pytest.fixture(scope="module")
def admin(server: Server) -> Iterator[httpx.Client]:
    found = re.search(r"for operators are on (http://\S+),", server.log)
    assert found is not None
    with httpx.Client(base_url=found[1], timeout=DEADLINE) as client:
        yield client


def test_fault_admin_port_answers_operators_and_no_others(server: Server, admin: httpx.Client) -> None:
    assert {path: admin.get(path).status_code for path in PATHS} == dict.fromkeys(PATHS, 200)
    text = admin.get("/metrics").text
    for name in ("event_loop_lag_seconds_bucket", "engine_step_gap_seconds_bucket", "num_requests_running"):
        assert f"tessera:{name}" in text
    assert admin.get("/v1/models").status_code == 404
    assert admin.post("/reset_prefix_cache").status_code == 404
    assert admin.post("/health").json()["error"]["type"] == "invalid_request_error"


def test_fault_admin_port_answers_while_the_port_is_full(server: Server, admin: httpx.Client) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    crowd = [socket.create_connection(address) for _ in range(300)]
    try:
        assert admin.get("/health").status_code == 200
    finally:
        for one in crowd:
            one.close()


def test_fault_admin_port_shows_the_last_metrics_of_an_engine_that_does_not_answer(
    server: Server, admin: httpx.Client
) -> None:
    pid = server.engine_pid()
    assert pid is not None
    assert "num_requests_running" in admin.get("/metrics").text
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        answers = [admin.get("/metrics") for _ in range(3)]
        admin.get("/health")
        assert time.monotonic() - begin < AT_ONCE
        assert all("num_requests_running" in answer.text for answer in answers)
        server.until(lambda: admin.get("/health").status_code == 503, "an unhealthy engine")
    finally:
        os.kill(pid, signal.SIGCONT)
    server.until(lambda: admin.get("/health").status_code == 200, "a healthy engine")


def test_fault_admin_port_and_port_answer_health_during_the_drain(server: Server, admin: httpx.Client) -> None:
    """And nothing else; the streams that run are finished."""
    authorization = {"authorization": f"Bearer {KEY}"}
    body = server.body("Once upon a time", 400, stream=True)
    with server.http.stream("POST", "/v1/completions", json=body, headers=authorization) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: "Stopping" in server.log, "the drain")
        with httpx.Client(base_url=server.url, timeout=DEADLINE) as other:
            for client in (admin, other):
                found = [client.get(path) for path in ("/health", "/ready", "/metrics")]
                assert [answer.status_code for answer in found] == [200, 503, 200]
        refused = httpx.post(server.url + "/v1/completions", json=body, headers=authorization)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutdown")
        assert int(refused.headers["retry-after"]) > 0
        *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
    assert server.end() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_fault_admin_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(AssertionError, match="choose another --admin-port"),
        running_server(None, tmp_path / "log", "--admin-port", str(taken.getsockname()[1])),
    ):
        pass
