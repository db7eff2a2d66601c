"""Log lines say for which request they were written, and cannot be forged or made to give secrets away."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.cli.command import main
from tessera.app.server import serve as serve_module
from tessera.app.server.connection import BoundedConnection
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.logs import JsonFormatter, TextFormatter, request_context, request_fields
from tessera.engine.contract.stalls import Stall, log_stall
from tessera.engine.ipc.client import EngineClient
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.paths import ROOT
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder

KEY = "sk-tessera-QmV0d2VlbiB0aGUgbGluZXM"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"authorization": f"Bearer {KEY}", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8}
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+: ")
HOSTILE = "a\x1b[2J\r\n2026-01-01T00:00:00.000Z INFO tessera.x: forged\x00\u2028\ud800"


@contextlib.contextmanager
def written(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """Captures what a process with this formatter writes; pytest gets nothing, whose reports hold no surrogates."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level, handlers = root.level, root.handlers
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    try:
        yield text
    finally:
        root.handlers = handlers
        root.setLevel(level)


def as_objects(text: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


def test_a_fault_names_the_request_its_caller_and_its_trace(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), api_keys=(KEY,))
    broken = FakeClient(always([RuntimeError(f"no tokens for {KEY}")]))
    with written(JsonFormatter()) as text:
        response = call(broken, settings, "POST", "/v1/completions", json=BODY, headers=HEADERS)
    assert response.status_code == 500
    fault, end = (line for line in as_objects(text) if line["logger"] in ("tessera.app", "tessera.request"))
    assert (fault["logger"], fault["level"]) == ("tessera.app", "error")
    assert "RuntimeError" in fault["exception"]
    caller = {"id": response.headers["x-request-id"], "client": "127.0.0.1", "key": "key-1", "trace_id": TRACE_ID}
    for line in (fault, end):
        assert {name: line.get(name) for name in caller} == caller
    assert KEY not in text.getvalue()


@pytest.mark.parametrize("parent", ["00-" + "0" * 32 + "-00f067aa0ba902b7-01", "ff" + HEADERS["traceparent"][2:], "x"])
def test_a_trace_parent_that_is_none_is_ignored(tmp_path: Path, parent: str) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    client = FakeClient(always(play(ids("hello"), finish="length")))
    with written(JsonFormatter()) as text:
        assert call(client, settings, "GET", "/v1/models", headers={"traceparent": parent}).status_code == 200
    (line,) = (line for line in as_objects(text) if line["logger"] == "tessera.request")
    assert "trace_id" not in line


def test_lines_of_uvicorn_name_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(self: BoundedConnection, msg: str) -> None:
        self.logger.warning("a line of uvicorn's own")
        self.transport.close()

    monkeypatch.setattr(BoundedConnection, "send_400_response", complain)
    client = FakeClient(always(play(ids("hello"), finish="length")))
    with (
        written(TextFormatter()) as text,
        serve(client, settings_for(write_model_folder(tmp_path))) as url,
        socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as connection,
    ):
        connection.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert connection.recv(1) == b""
    assert re.search(r"WARNING uvicorn\.error: a line of uvicorn's own client=127\.0\.0\.1$", text.getvalue(), re.M)


def test_the_engine_calls_requests_by_the_ids_that_clients_see(tmp_path: Path) -> None:
    async def submitted() -> str:
        request_context.set({"id": "req_0123"})
        client = EngineClient(tmp_path)
        await client.start()
        try:
            return client._new_id()
        finally:
            await client.close()

    request_id = asyncio.run(submitted())
    assert request_fields(request_id) == {"id": "req_0123"}
    with written(JsonFormatter({"process": "engine"})) as text:
        log_stall(Stall("the engine", 2.0, 1.0, request_id, ()))
    (line,) = as_objects(text)
    assert (line["id"], line["process"]) == ("req_0123", "engine")


def test_no_value_message_or_traceback_forges_a_line_of_text() -> None:
    with written(TextFormatter()) as text:
        logger = logging.getLogger("tessera.x")
        logger.warning("the path %s", HOSTILE, extra={"fields": {"endpoint": HOSTILE}})
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("failed")
    lines = text.getvalue().encode().decode().split("\n")  # lone surrogates could not be written
    assert sum(LINE.match(line) is not None for line in lines) == 2
    assert all(character.isprintable() for line in lines for character in line)
    assert r"\x1b[2J" in lines[0]


@pytest.mark.parametrize("secret", [KEY, "hf_abcdefghijklmnop", "Bearer hunter2hunter2", "Basic dXNlcjpwYXNz"])
def test_secrets_are_blotted_out_wherever_a_line_quotes_them(secret: str) -> None:
    for formatter in (TextFormatter(), JsonFormatter()):
        with written(formatter) as text:
            logging.getLogger("tessera.x").error("GET /%s", secret, extra={"fields": {"param": f'"{secret}"'}})
        assert secret.split()[-1] not in text.getvalue()
        assert text.getvalue().count("[hidden]") == 2


CRASHES = """
import sys, threading, warnings
from tessera.engine.contract.logs import configure_logging
configure_logging("json", process="app-1")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
class Dying:
    def __del__(self): raise KeyError("gone")
Dying()
raise RuntimeError("the end")
"""


def test_exceptions_that_nothing_catches_are_lines_like_others() -> None:
    done = subprocess.run([sys.executable, "-c", CRASHES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert [line["level"] for line in lines] == ["warning", "critical", "critical", "critical"]
    for line, error in zip(lines[1:], ("ZeroDivisionError", "KeyError", "RuntimeError: the end"), strict=True):
        assert error in line["exception"]
        assert line["process"] == "app-1"


def test_a_server_that_cannot_start_says_so_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise ConfigError("the model is at fault")

    monkeypatch.setattr(serve_module, "run_server", refuse)
    with written(JsonFormatter()) as text:
        assert main(["serve", "--log-format", "json"]) == 2
    (line,) = as_objects(text)
    assert (line["level"], line["message"]) == ("critical", "the model is at fault")
