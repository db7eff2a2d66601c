"""The HTTP layer: huge heads and bodies, deep JSON, slow senders and readers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tessera.app.server.connection import MAX_HEAD_BYTES
from tessera.app.settings import AppSettings
from tessera.engine.contract.messages import RequestOutput
from tests.faults.app_fixtures import post
from tests.support.fake_client import FakeClient, Submission
from tests.support.http_fixtures import call, ids, serve, settings_for, write_model_folder
from tests.support.surface_fixtures import PATIENCE, says

TEXT = {"model": "tiny", "prompt": "hi"}
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: tiny\r\ncontent-type: application/json\r\n"
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]


def impatient(folder: Path, **changes: Any) -> AppSettings:
    return settings_for(write_model_folder(folder), **{"body_timeout": 0.3, "stall_timeout": 0.2, **changes})


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def read_to_the_end(connection: socket.socket) -> bytes:
    """What comes until the server closes; a reset, because of what was still under way to it, ends it as well."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


# ---- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "endless"])
@pytest.mark.parametrize("kind", ["one header", "many headers", "path"])
def test_fault_http_layer_huge_heads_are_refused(tmp_path: Path, kind: str, whole: bool) -> None:
    filling = b"y" * (MAX_HEAD_BYTES + 1000)
    start = {
        "one header": HEAD + b"x: " + filling,
        "many headers": HEAD + b"".join(b"h%d: %s\r\n" % (i, b"z" * 90) for i in range(1000)),
        "path": b"GET /" + filling,
    }[kind]
    end = {"one header": b"\r\n\r\n", "many headers": b"\r\n", "path": b" HTTP/1.1\r\nhost: x\r\n\r\n"}[kind]
    with serve(says("ok"), impatient(tmp_path, body_timeout=PATIENCE)) as url:
        with connect(url) as connection:
            connection.sendall(start + end if whole else start)
            answer = read_to_the_end(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"request_header_fields_too_large"' in answer
        assert httpx.get(f"{url}/health").status_code == 200


def test_fault_http_layer_a_large_head_within_the_limit_is_taken(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url, httpx.Client(base_url=url) as http:
        for _ in range(3):  # on one connection
            assert http.get("/health", headers={"x": "y" * (MAX_HEAD_BYTES - 2000)}).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"PO", HEAD, b"\r\n\r\n"], ids=["nothing", "a word", "half", "line ends"])
def test_fault_http_layer_slow_heads_are_ended_by_a_deadline(tmp_path: Path, sent: bytes) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url, connect(url) as connection:
        connection.sendall(sent)
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 408 ")


def test_fault_http_layer_a_slow_head_after_an_answer_is_ended_as_well(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url, connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /he")
        assert b"HTTP/1.1 408 " in read_to_the_end(connection)


# ---- bodies -------------------------------------------------------------------------------------


def test_fault_http_layer_huge_bodies_are_refused(tmp_path: Path) -> None:
    settings = impatient(tmp_path, max_body_bytes=1000)

    async def chunked() -> Any:
        for _ in range(11):
            yield b" " * 100

    for path in PATHS:
        for content in (b" " * 1001, chunked()):
            response = call(says("ok"), settings, "POST", path, content=content, headers=JSON)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"


def test_fault_http_layer_a_huge_body_is_refused_by_its_length_alone(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path, body_timeout=PATIENCE)) as url, connect(url) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % 2**40)
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"a": ' * 65 + b"1" + b"}" * 65,
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 2**20,
    ],
    ids=lambda content: str(content[-40:]),
)
def test_fault_http_layer_broken_and_deep_json_is_refused(settings: AppSettings, content: bytes) -> None:
    for path in PATHS:
        response = call(says("ok"), settings, "POST", path, content=content, headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"


def test_fault_http_layer_deep_but_accepted_json(settings: AppSettings) -> None:
    nested: Any = 1
    for _ in range(60):
        nested = [nested]
    assert post(settings, "/v1/completions", {**TEXT, "ignored": nested}).status_code == 200


def test_fault_http_layer_slow_bodies_are_ended_by_a_deadline(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url, connect(url) as connection:
        connection.sendall(HEAD + b'content-length: 1000\r\n\r\n{"model"')
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


# ---- readers ------------------------------------------------------------------------------------


def test_fault_http_layer_a_stalled_reader_holds_little_and_loses_its_answer(tmp_path: Path) -> None:
    """The engine's outputs are left where they are once what the sockets hold is full."""
    num_outputs = 0
    token_ids = ids("a" * 4096)

    def endless(submission: Submission) -> Iterator[RequestOutput]:
        nonlocal num_outputs
        while True:
            num_outputs += 1
            yield RequestOutput("r", token_ids)

    client = FakeClient(endless)
    with serve(client, impatient(tmp_path)) as url:
        body = orjson.dumps({**TEXT, "stream": True})
        with connect(url) as connection:
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(1), "the answer began"
            (submission,) = client.submissions
            assert submission.aborted.wait(PATIENCE)
            in_sockets = buffered(connection)
        assert num_outputs * 4096 < in_sockets + 2**20
        assert httpx.get(f"{url}/health").status_code == 200


def buffered(connection: socket.socket) -> int:
    """Bytes that the two ends' sockets held: the reader now takes what the server got rid of."""
    end = time.monotonic() + PATIENCE
    size = 0
    while time.monotonic() < end and (piece := connection.recv(2**20)):
        size += len(piece)
    return size
