"""Over a real server and with the official SDK: streams flow, and clients that leave or stall cost nothing."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from app.settings import AppSettings
from engine.errors import EngineError, QueueFullError
from tests.fake_client import FakeClient, always, play
from tests.http_fixtures import ids, serve, settings_for, write_model_folder

TEXT = {"model": "tiny", "prompt": "hi"}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
HELLO = play([*ids("hello wörld 🙂"), 0], stop_token_id=0, logprobs=True)
PATIENCE = 30  # seconds until a test gives up waiting for what must happen


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


@contextmanager
def sdk(client: FakeClient, settings: AppSettings, key: str = "none") -> Iterator[openai.OpenAI]:
    with (
        serve(client, settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as api,
    ):
        yield api


def test_sdk_chat(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api:
        answer = api.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1, n=2)
        assert [choice.message.content for choice in answer.choices] == ["hello wörld 🙂"] * 2
        assert answer.choices[0].finish_reason == "stop"
        content = answer.choices[0].logprobs.content
        assert b"".join(bytes(token.bytes) for token in content).decode() == "hello wörld 🙂"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer._request_id.startswith("req_")


def test_sdk_chat_stream(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api:
        chunks = list(api.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "hello wörld 🙂"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(HELLO)


def test_sdk_stream_helper_assembles_the_message(settings: AppSettings) -> None:
    with (
        sdk(FakeClient(always(HELLO)), settings) as api,
        api.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream,
    ):
        final = stream.get_final_completion()
        assert final.choices[0].message.content == "hello wörld 🙂"
        assert final.usage.completion_tokens == len(HELLO)


def test_sdk_completions_and_models(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api:
        assert api.completions.create(**TEXT, logprobs=1).choices[0].text == "hello wörld 🙂"
        pieces = [chunk.choices[0].text for chunk in api.completions.create(**TEXT, stream=True)]
        assert "".join(pieces) == "hello wörld 🙂"
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert api.models.retrieve("tiny").object == "model"


def test_sdk_raises_the_right_errors(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), api_keys=("right",))
    with sdk(FakeClient(always([QueueFullError("full")])), settings, key="right") as api:
        with pytest.raises(openai.NotFoundError) as missing:
            api.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            api.completions.create(**TEXT, temperature=7)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.RateLimitError):
            api.completions.create(**TEXT)
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").models.list()


def test_wire_6_sdk_raises_in_mid_stream(settings: AppSettings) -> None:
    outputs = [*play(ids("ab"), finish=None), EngineError("broken off")]
    with sdk(FakeClient(always(outputs)), settings) as api:
        seen = []
        with pytest.raises(openai.APIError, match="broken off"):
            seen.extend(chunk.choices[0].text for chunk in api.completions.create(**TEXT, stream=True))


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
    settings = settings_for(write_model_folder(tmp_path), request_timeout=1.0)
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
