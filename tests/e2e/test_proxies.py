"""The configurations of deploy/proxies in the proxies themselves, before a server."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.monitoring import DEPLOY
from tests.support.servers.server_fixture import DEADLINE, Server, running_server

PROXIES = DEPLOY / "proxies"
BELOW = ("--root-path", "/llm", "--forwarded-allow-ips", "127.0.0.1")


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tiny_folder, tmp_path_factory.mktemp("proxied") / "log", *BELOW) as server:
        yield server


@contextlib.contextmanager
def running_proxy(server: Server, config: Path, command: list[str], folder: Path) -> Iterator[str]:
    """A proxy with a copy of its configuration in which the ports are free ones; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    text, num_ports = re.subn(r"(127\.0\.0\.1:|port_value: )808\d\b", rf"\g<1>{port}", config.read_text())
    text, num_servers = re.subn(r"(127\.0\.0\.1:|port_value: )8000\b", rf"\g<1>{httpx.URL(server.url).port}", text)
    assert (num_ports >= 1, num_servers) == (True, 1)
    text = text.replace("/tmp/tessera-nginx", str(folder / "nginx"))
    copy = folder / config.name
    copy.write_text(text)
    log = folder / "proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, str(copy)], stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}/llm/"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url + "health").status_code == 200
            return False

        server.until(answers, f"{config.name} to serve")
        yield url
    finally:
        process.terminate()
        process.wait(DEADLINE)


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ("nginx.conf", ["nginx", "-g", "daemon off;", "-c"]),
        ("Caddyfile", ["caddy", "run", "--adapter", "caddyfile", "--config"]),
        ("envoy.yaml", ["envoy", "--log-level", "warn", "--base-id", "77", "-c"]),
    ],
)
def test_the_page_the_api_and_streams_pass(server: Server, config: str, command: list[str], tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with running_proxy(server, PROXIES / config, command, tmp_path) as url, httpx.Client(timeout=DEADLINE) as http:
        assert "<title>" in http.get(url, headers={"accept": "text/html"}).text
        assert http.get(url + "ui/main.js").status_code == 200
        assert http.get(url + "openapi.json").json()["servers"] == [{"url": "/llm"}]
        body = {**server.body("Once upon a time", 300), "stream": True}
        with http.stream("POST", url + "v1/completions", json=body) as response:
            lines = filter(None, response.iter_lines())
            next(lines)
            server.until(lambda: server.metrics()["num_requests_running"] == 1, "an answer under way")
            assert sum(1 for _ in lines) > 10
        http.post(url + "v1/completions", json=server.body("Once", 1), headers={"x-request-id": f"through-{config}"})
        server.until(lambda: f"client_id=through-{config}" in server.log, "the line of the request")
        assert http.post(url + "v1/completions", json={}).status_code == 400, "errors are the server's own"
