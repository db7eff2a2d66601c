"""The HTTP layer: huge heads, bodies and trailers, deep JSON, requests sent ahead, slow senders and readers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tessera.app.http.body import (
    LARGE_BODY,
    MAX_LARGE_BODIES_OF_ONE,
    LargeBody,
    parse_json_object,
)
from tessera.app.http.json_reader import MAX_JSON_CONTAINERS, MAX_JSON_RUN, MAX_JSON_STRINGS, MAX_JSON_VALUES
from tessera.app.server.connection import MAX_FIELDS, MAX_FRAMING_BYTES, MAX_HEAD_BYTES, MAX_QUEUED
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import RequestOutput
from tests.faults.app_fixtures import post
from tests.faults.raw_http import HEAD, TEXT, connect, read_to_the_end, responses
from tests.support.fakes.fake_client import FakeClient, Submission
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import PATIENCE, says

JSON = {"content-type": "application/json"}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]


def impatient(folder: Path, **changes: Any) -> AppSettings:
    return settings_for(write_model_folder(folder), **{"body_timeout": 0.3, "stall_timeout": 0.2, **changes})


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


@pytest.mark.parametrize("kind", ["header fields", "parameters", "cookies"])
def test_fault_http_layer_heads_of_many_parts_are_refused(tmp_path: Path, kind: str) -> None:
    """64 KiB of them took 10 to 70 ms of the event loop."""

    def request(count: int) -> bytes:
        query = b"?" + b"&".join([b"a"] * count) if kind == "parameters" else b""
        cookies = b"cookie: %s\r\n" % b";".join([b"a=b"] * count) if kind == "cookies" else b""
        fields = b"a:\r\n" * (count - 1) if kind == "header fields" else b""
        return b"GET /health%s HTTP/1.1\r\nhost: x\r\n%s%s\r\n" % (query, cookies, fields)

    with serve(says("ok"), impatient(tmp_path)) as url:
        for count, status in ((MAX_FIELDS, b"200"), (MAX_FIELDS + 1, b"431")):
            with connect(url) as connection:
                connection.sendall(request(count))
                answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 %s " % status)
        assert b"at most %d %s." % (MAX_FIELDS, kind.encode()) in answer


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


# ---- trailers, chunk extensions ------------------------------------------------------------------

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"


def test_fault_http_layer_trailer_fields_are_no_headers(tmp_path: Path) -> None:
    body = orjson.dumps(TEXT)
    fields = b"authorization: Bearer right\r\nx-api-key: right\r\nx-request-id: mine\r\n"
    with serve(says("ok"), impatient(tmp_path, api_keys=("right",))) as url:
        for header, status in ((b"", b"401"), (b"x-api-key: right\r\n", b"200")):
            with connect(url) as connection:
                request = CHUNKED + header + b"\r\n%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, fields)
                connection.sendall(request)
                answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 %s " % status)
            assert b"x-client-request-id" not in answer


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"0\r\n", b"".join(b"t%d: %s\r\n" % (i, b"y" * 20) for i in range(3000))),
        (b"0\r\nt: ", b"y" * 80_000),
        (b"1;", b"y" * 80_000),
        (b"1\r\n{\r\n", b"1;%s\r\n{\r\n" % (b"y" * 1000) * 80),
    ],
    ids=["trailer fields", "one trailer field", "chunk extension", "chunk extensions"],
)
def test_fault_http_layer_endless_framing_is_refused(tmp_path: Path, start: bytes, piece: bytes) -> None:
    with serve(says("ok"), impatient(tmp_path, body_timeout=PATIENCE)) as url:
        with connect(url) as connection:
            connection.sendall(CHUNKED + b"\r\n1\r\n{\r\n" + start)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    connection.sendall(piece)
            answer = read_to_the_end(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert httpx.get(f"{url}/health").status_code == 200


def test_fault_http_layer_a_body_in_small_chunks_is_taken(tmp_path: Path) -> None:
    body = orjson.dumps({**TEXT, "ignored": "y" * 20_000})
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert len(chunks) - len(body) > MAX_FRAMING_BYTES
    with serve(says("ok"), impatient(tmp_path, body_timeout=PATIENCE)) as url, connect(url) as connection:
        connection.sendall(CHUNKED + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 "), "the body comes in pieces of its own"
        connection.sendall(chunks)
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_fault_http_layer_a_body_of_empty_lists_holds_up_nothing() -> None:
    """Sixteen megabytes of brackets are refused before objects are made of them; those within strings are text."""
    for content in (b'{"prompt": [' + b"[]," * (16 * 2**20 // 3) + b"1]}", b'{"a": ' + b"[" * 2**24):
        used = time.process_time()
        with pytest.raises(InvalidRequestError):
            parse_json_object(content)
        assert time.process_time() - used < 0.5
    for text in ("[{" * MAX_JSON_CONTAINERS, '\\"[' * MAX_JSON_CONTAINERS):
        assert parse_json_object(orjson.dumps({"prompt": text})) == {"prompt": text}
    within: dict[str, list[list[Any]]] = {"prompt": [[]] * (MAX_JSON_CONTAINERS - 2)}
    assert parse_json_object(orjson.dumps(within)) == within
    with pytest.raises(InvalidRequestError, match="objects and lists"):
        parse_json_object(orjson.dumps({"prompt": [[]] * (MAX_JSON_CONTAINERS - 1)}))


def test_fault_http_layer_a_body_of_millions_of_values_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are refused before objects are made of them; commas within strings are text."""
    made: list[bytes] = []
    parse = orjson.loads

    def note(body: bytes) -> Any:
        made.append(body)
        return parse(body)

    monkeypatch.setattr("tessera.app.http.json_reader.orjson.loads", note)
    for content, what in (
        (b'{"prompt": [' + b"5," * (8 * 2**20 - 10) + b"5]}", f"{MAX_JSON_VALUES} values"),
        (b'{"a": "' + b"," * 99 + b'", "b": [' + b"1,\n" * 2**21, f"{MAX_JSON_VALUES} values"),
        (b'{"a": [' + b'"",' * MAX_JSON_STRINGS + b"1]}", f"{MAX_JSON_STRINGS} strings"),
        (b'{"a": [1,' + b" " * MAX_JSON_RUN + b"1,2]}", f"{MAX_JSON_RUN} bytes"),
        (b'{"a": [1,' + b"1" * MAX_JSON_RUN + b",2]}", f"{MAX_JSON_RUN} bytes"),
        (b'{"a": 1, "' + b"a" * MAX_JSON_RUN + b'": 1, "b": 2}', f"{MAX_JSON_RUN} bytes"),
    ):
        with pytest.raises(InvalidRequestError, match=f"more than {what}"):
            parse_json_object(content)
    assert not made
    text = ',"' * MAX_JSON_VALUES
    assert parse_json_object(orjson.dumps({"prompt": text})) == {"prompt": text}
    most = [1] * MAX_JSON_VALUES
    assert parse_json_object(orjson.dumps({"prompt": most})) == {"prompt": most}
    with pytest.raises(InvalidRequestError, match="values"):
        parse_json_object(orjson.dumps({"prompt": [*most, 1]}))


def test_fault_http_layer_large_bodies_in_hand_are_bounded(tmp_path: Path) -> None:
    """Those that hold theirs back leave no room for another large one; small ones are answered."""
    largest = 2 * LARGE_BODY
    settings = impatient(tmp_path, max_body_bytes=largest, body_timeout=PATIENCE)
    content = b" " * (largest - 100)
    head = HEAD + b"content-length: %d\r\n\r\n" % largest
    with serve(says("ok"), settings) as url:
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_LARGE_BODIES_OF_ONE):
                stack.enter_context(connect(url)).sendall(head + content)
            end = time.monotonic() + PATIENCE
            while LargeBody.in_hand.total() < MAX_LARGE_BODIES_OF_ONE * len(content):
                assert time.monotonic() < end
            refused = httpx.post(f"{url}/v1/completions", content=content, headers=JSON)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200
        while LargeBody.in_hand:
            assert time.monotonic() < end
        padded = orjson.dumps({**TEXT, "ignored": "y" * LARGE_BODY})
        assert httpx.post(f"{url}/v1/completions", content=padded, headers=JSON).status_code == 200


# ---- requests sent ahead ------------------------------------------------------------------------

ASK = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def test_fault_http_layer_requests_sent_ahead_are_answered_in_turn(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url, connect(url) as connection:
        for _ in range(3):
            connection.sendall(ASK * MAX_QUEUED)
            answers = b""
            while answers.count(b"HTTP/1.1 200 ") < MAX_QUEUED:
                answers += connection.recv(65536)


def test_fault_http_layer_many_requests_sent_ahead_end_the_connection(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url:
        with connect(url) as connection:
            connection.sendall(ASK * 5000)
            assert read_to_the_end(connection).count(b"HTTP/1.1 200 ") <= MAX_QUEUED + 1
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("garbage", [b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"], ids=["line", "head"])
def test_fault_http_layer_garbage_behind_requests_leaves_their_answers_whole(tmp_path: Path, garbage: bytes) -> None:
    """Those before it are answered in turn, then it is refused, and the connection ends."""
    client = says("ok")
    body = orjson.dumps(TEXT)
    ask = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with serve(client, impatient(tmp_path, body_timeout=PATIENCE)) as url:
        for before in (b"", ask, ask + ASK + ask, ASK * 5):
            with connect(url) as connection:
                connection.sendall(before + garbage)
                statuses = [status for status, _ in responses(read_to_the_end(connection))]
            assert statuses == [200] * before.count(b"host: ") + [400]


def test_fault_http_layer_a_broken_body_behind_a_request_is_refused_in_turn(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path, body_timeout=PATIENCE)) as url:
        for before in (b"", ASK, ASK * 3):
            with connect(url) as connection:
                connection.sendall(before + CHUNKED + b"\r\nno size\r\n")
                answers = responses(read_to_the_end(connection))
            assert [status for status, _ in answers] == [200] * before.count(b"host: ") + [400]
            assert answers[-1][1]["error"]["code"] == "invalid_http"
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
        (b"GET /version HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: user@a\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: [::1\r\n\r\n", 400),
        (b"GET /version HTTP/0.9\r\nhost: a\r\n\r\n", 505),
        (b"GET /version\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", 200),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
    ],
    ids=str,
)
def test_fault_http_layer_heads_are_as_rfc_9112_has_them(tmp_path: Path, head: bytes, status: int) -> None:
    with serve(says("ok"), impatient(tmp_path, body_timeout=PATIENCE)) as url, connect(url) as connection:
        connection.sendall(head)
        ((found, _),) = responses(read_to_the_end(connection))
    assert found == status


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


def test_fault_http_layer_who_never_reads_loses_the_connection(tmp_path: Path) -> None:
    with serve(says("ok"), impatient(tmp_path)) as url, httpx.Client(base_url=url) as http:
        host, port = url.removeprefix("http://").split(":")
        size = len(http.get("/openapi.json").content)
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect((host, int(port)))
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * MAX_QUEUED)
            assert size * MAX_QUEUED > 3 * 2**20, "more than a socket holds"
            end = time.monotonic() + PATIENCE
            while b"\ntessera:http_connections 1.0\n" not in http.get("/metrics").content:
                assert time.monotonic() < end, "their connections stay open"


def buffered(connection: socket.socket) -> int:
    """Bytes that the two ends' sockets held: the reader now takes what the server got rid of."""
    end = time.monotonic() + PATIENCE
    size = 0
    while time.monotonic() < end and (piece := connection.recv(2**20)):
        size += len(piece)
    return size
