"""Over a real server: streams flow, and clients that leave or stall cost nothing."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import httpx
import orjson
import pytest

from tessera.app.settings import AppSettings
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import ids, serve, settings_for, write_model_folder

TEXT = {"model": "tiny", "prompt": "hi"}
HELLO = play([*ids("hello wörld 🙂"), 0], stop_token_id=0, logprobs=True)
PATIENCE = 30  # seconds until a test gives up waiting for what must happen


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_flows_and_its_client_may_leave(settings: AppSettings, n: int) -> None:
    client = FakeClient(always(play(ids("abc"), finish=None)), hang=True)
    with serve(client, settings) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        with http.stream("POST", "/v1/completions", json={**TEXT, "stream": True, "n": n}) as response:
            lines = (line for line in response.iter_lines() if line)
            texts = [orjson.loads(line[6:])["choices"][0]["text"] for line in itertools.islice(lines, 3 * n)]
            assert sorted(texts) == sorted("abc" * n), "chunks came while the answer was still open"
        for submission in client.submissions:
            assert submission.aborted.wait(PATIENCE)
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_leave_before_the_first_token(settings: AppSettings, stream: bool) -> None:
    client = FakeClient(always([]), hang=True)
    with serve(client, settings) as url:
        body = orjson.dumps({**TEXT, "stream": stream})
        with send_request(url, "/v1/completions", body, len(body)):
            assert client.submitted.wait(PATIENCE)
        assert client.submissions[0].aborted.wait(PATIENCE)


def send_request(url: str, path: str, body: bytes, content_length: int) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    head = f"POST {path} HTTP/1.1\r\nhost: tiny\r\ncontent-type: application/json\r\ncontent-length: {content_length}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def test_an_answer_that_takes_too_long_ends(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), request_timeout=0.4)
    client = FakeClient(always(play(ids("ab"), finish=None)), hang=True)
    with serve(client, settings) as url:
        whole = httpx.post(f"{url}/v1/completions", json=TEXT, timeout=PATIENCE)
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "generation_timeout"
        streamed = httpx.post(f"{url}/v1/completions", json={**TEXT, "stream": True}, timeout=PATIENCE)
        assert streamed.status_code == 200
        frames = streamed.text.strip().split("\n\n")
        assert orjson.loads(frames[-2][6:])["error"]["code"] == "generation_timeout"
        assert frames[-1] == "data: [DONE]"
        assert all(submission.aborted.wait(PATIENCE) for submission in client.submissions)


def test_no_cross_origin_access(settings: AppSettings) -> None:
    with serve(FakeClient(always(HELLO)), settings) as url:
        answer = httpx.post(f"{url}/v1/completions", json=TEXT, headers={"origin": "http://elsewhere"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
