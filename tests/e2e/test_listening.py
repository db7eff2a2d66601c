"""Real servers on TLS and on a Unix socket: certificates exchanged under way, clients' certificates, the drain."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.certificates import Authority, Certificate
from tests.support.servers.server_fixture import DEADLINE, Server, running_server


class Files:
    """The server's certificate and key, which a test replaces, and the clients' certificate."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self.ca = self._authority.cert
        self.used = Certificate(folder / "used.pem", folder / "used.key")
        self.client = self._authority.sign("client")
        self.install("first")

    def install(self, name: str) -> None:
        made = self._authority.sign(name)
        self.used.key.write_text(made.key.read_text())
        self.used.cert.write_text(made.cert.read_text())

    def context(self, *, with_certificate: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if with_certificate:
            context.load_cert_chain(self.client.cert, self.client.key)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("tls") / "log"
    options = ("--ssl-certfile", files.used.cert, "--ssl-keyfile", files.used.key, "--ssl-ca-certs", files.ca)
    others = ("--api-workers", "2", "--admin-port", "0")
    with running_server(None, log, *map(str, options), *others, verify=files.context()) as server:
        server.until(lambda: server.children("tessera.app.server.worker"), "the second app process")
        yield server


def admin_url(server: Server) -> str:
    found = re.search(r"for operators are on (https://\S+),", server.log)
    assert found is not None
    return found[1]


def served_name(url: str, context: ssl.SSLContext) -> str:
    """The common name of the certificate that a new connection gets."""
    port = int(url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        found = secured.getpeercert()
    assert found is not None
    subject: Any = found["subject"]
    return str(dict(pair for (pair,) in subject)["commonName"])


def test_clients_need_a_certificate_except_on_the_admin_port(server: Server, files: Files) -> None:
    assert server.url.startswith("https://")
    assert server.complete("Once", 2).text
    without = files.context(with_certificate=False)
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        httpx.get(server.url + "/health", verify=without)
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health")
    assert httpx.get(admin_url(server) + "/ready", verify=without).status_code == 200


def test_sighup_exchanges_the_certificate_and_leaves_open_connections_alone(server: Server, files: Files) -> None:
    """In all app processes and on the admin port; files that do not fit leave the old one in place."""
    urls = (server.url, admin_url(server))
    assert {served_name(url, files.context()) for url in urls} == {"first"}
    with server.stream(server.body("Once upon a time", 150)) as chunks:
        next(chunks)
        files.install("second")
        os.kill(server.process.pid, signal.SIGHUP)
        server.until(lambda: {served_name(urls[0], files.context()) for _ in range(8)} == {"second"}, "both processes")
        server.until(lambda: served_name(urls[1], files.context()) == "second", "the admin port")
        assert sum(1 for _ in chunks) > 0, "the stream goes on to its end"
    files.used.key.write_text(files.client.key.read_text())
    os.kill(server.process.pid, signal.SIGHUP)
    server.until(lambda: "the certificate stays as it was: --ssl-keyfile" in server.log, "the complaint")
    assert {served_name(urls[0], files.context()) for _ in range(8)} == {"second"}


def test_wrong_files_end_the_start_before_the_model_is_loaded(files: Files, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"exit code 2; its log:\ntessera: --ssl-certfile \S+ cannot be read"),
        running_server(tmp_path / "no model", tmp_path / "log", "--ssl-certfile", str(tmp_path / "missing")),
    ):
        pass


def test_a_unix_socket_serves_and_drains(tmp_path: Path) -> None:
    """Through the socket, with a proxy's headers believed; a second server is refused, and the file goes at the end."""
    path = tmp_path / "socket"
    options = ("--uds", str(path), "--uds-mode", "600", "--forwarded-allow-ips", "unix")
    with running_server(None, tmp_path / "log", *options) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with (
            pytest.raises(AssertionError, match="another server listens there"),
            running_server(None, tmp_path / "log2", "--uds", str(path)),
        ):
            pass
        page = server.http.get("/", headers={"accept": "text/html", "x-forwarded-prefix": "/llm"})
        assert '<base href="/llm/">' in page.text
        with server.stream(server.body("Once upon a time", 300)) as chunks:
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: "Stopping" in server.log, "the drain")
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as other:
                assert [other.get(p).status_code for p in ("/health", "/ready", "/metrics")] == [200, 503, 200]
                refused = other.post("/v1/completions", json=server.body("a", 1))
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutdown")
                assert int(refused.headers["retry-after"]) > 0
            assert sum(1 for _ in chunks) > 0
        assert server.end() == 0
        assert not path.exists()
