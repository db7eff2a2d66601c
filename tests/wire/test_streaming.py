"""Points 1 to 7: what a streamed answer is made of."""

from __future__ import annotations

import json
import socket
from typing import Any

import anthropic
import openai
import pytest

from tessera.engine.contract.errors import EngineError
from tests.support.fakes.fake_client import play
from tests.support.servers.http_fixtures import events, ids
from tests.support.servers.surface_fixtures import CALL, OTHER_CALL
from tests.wire.conftest import TEXT, Scripted
from tests.wire.requests import ASK, CHAT, TOOLS

NUM_TOKENS = len(ids(TEXT)) + 1
PATHS: Any = {"/v1/chat/completions": CHAT, "/v1/completions": ASK}
USAGE: Any = {"include_usage": True}


def text_of(chunks: list[Any], index: int = 0) -> str:
    own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join((choice.delta.content or "") if hasattr(choice, "delta") else choice.text for choice in own)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream_options": USAGE}, {"logprobs": None, "echo": None}], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_wire_1_frames_are_data_lines_and_done_is_the_last(plain: Scripted, path: str, fields: Any) -> None:
    response = plain.http.post(path, json={**PATHS[path], "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content.endswith(b"}\n\ndata: [DONE]\n\n")
    assert response.content.count(b"[DONE]") == 1
    assert len(events(response.content)) > NUM_TOKENS // 2, "every other frame is JSON"


@pytest.mark.parametrize("stream", [True, False])
def test_wire_1_a_client_of_http_1_0_gets_no_chunks(plain: Scripted, stream: bool) -> None:
    body = json.dumps({**ASK, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    url = plain.http.base_url
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    fields, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields.lower()
    if stream:
        assert events(content), "nothing stands between the events"
    else:
        assert json.loads(content)["choices"][0]["text"] == TEXT


def test_wire_2_first_and_last_chunk_of_each_choice(plain: Scripted) -> None:
    chunks = list(plain.openai.chat.completions.create(**CHAT, n=2, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    for index in range(2):
        first, *middle, last = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert first.delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
        assert last.delta.model_dump(exclude_unset=True) == {}
        assert last.finish_reason == "stop"
        assert all(choice.finish_reason is None for choice in [first, *middle])
        assert all("finish_reason" in choice.model_fields_set for choice in [first, *middle]), "null, not left out"
        assert all(choice.delta.role is None for choice in middle), "the role comes once"
        assert text_of(chunks, index) == TEXT


def test_wire_2_text_completions_keep_their_id(plain: Scripted) -> None:
    chunks = list(plain.openai.completions.create(**ASK, stream=True))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert text_of(chunks) == TEXT


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_wire_3_usage_chunk_is_last_and_others_have_null(plain: Scripted, kind: str) -> None:
    api: Any = plain.openai.chat.completions if kind == "chat" else plain.openai.completions
    *told, last = list(api.create(**(CHAT if kind == "chat" else ASK), stream=True, stream_options=USAGE))
    assert last.choices == []
    assert last.usage.completion_tokens == NUM_TOKENS
    assert last.usage.total_tokens == last.usage.prompt_tokens + NUM_TOKENS
    assert last.usage.prompt_tokens_details.cached_tokens == 16
    assert all(chunk.choices for chunk in told)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in told), "null, not left out"


@pytest.mark.parametrize(
    "fields", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}], ids=str
)
@pytest.mark.parametrize("path", PATHS)
def test_wire_3_no_usage_unless_asked_for(plain: Scripted, path: str, fields: Any) -> None:
    chunks = events(plain.http.post(path, json={**PATHS[path], "stream": True, **fields}).content)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}], ids=str)
def test_wire_3_stream_options_without_stream_are_refused(plain: Scripted, stream: Any) -> None:
    for api, body in ((plain.openai.chat.completions, CHAT), (plain.openai.completions, ASK)):
        with pytest.raises(openai.BadRequestError) as refused:
            api.create(**body, stream_options=USAGE, **stream)
        assert refused.value.param == "stream_options"


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_wire_4_choices_interleave_by_index_with_one_usage(plain: Scripted, kind: str) -> None:
    api: Any = plain.openai.chat.completions if kind == "chat" else plain.openai.completions
    chunks = list(api.create(**(CHAT if kind == "chat" else ASK), n=3, stream=True, stream_options=USAGE))
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3 * NUM_TOKENS]
    *told, _ = chunks
    assert [text_of(told, index) for index in range(3)] == [TEXT] * 3
    order = [chunk.choices[0].index for chunk in told]
    assert order != sorted(order), "all of one choice came before the next"
    ends = [chunk.choices[0].index for chunk in told if chunk.choices[0].finish_reason == "stop"]
    assert sorted(ends) == [0, 1, 2]


def test_wire_4_n_is_at_most_128(plain: Scripted) -> None:
    answer = plain.openai.chat.completions.create(**CHAT, n=128)
    assert [choice.index for choice in answer.choices] == list(range(128))
    for n in (0, 129):
        with pytest.raises(openai.BadRequestError) as refused:
            plain.openai.chat.completions.create(**CHAT, n=n)
        assert refused.value.param == "n"


@pytest.mark.parametrize("per_output", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", ["rld a", ["rld a", "xyz"], ["ld and", "wörld am"], "ö"], ids=str)
def test_wire_5_stop_strings_never_leak(plain: Scripted, stop: Any, per_output: int) -> None:
    text = "hello wörld and wörld am end"
    expected = min((text[: text.index(s)] for s in ([stop] if isinstance(stop, str) else stop) if s in text), key=len)
    plain.engine.hang = True
    plain.plays(play(ids(text), finish=None, per_output=per_output))
    try:
        whole = plain.openai.completions.create(**ASK, stop=stop).choices[0]
        assert (whole.text, whole.finish_reason) == (expected, "stop")
        shown = ""
        for chunk in plain.openai.chat.completions.create(**CHAT, stop=stop, stream=True):
            shown += chunk.choices[0].delta.content or ""
            assert expected.startswith(shown), "not even for a moment"
        assert shown == expected
    finally:
        plain.engine.hang = False
    assert all(submission.aborted.is_set() for submission in plain.engine.submissions), "the work ends with the text"


def test_wire_5_a_false_beginning_of_a_stop_string_is_shown(plain: Scripted) -> None:
    stream = plain.openai.completions.create(**ASK, stop=["wörm", "🙂🙂"], stream=True)
    assert text_of(list(stream)) == TEXT


def test_wire_5_incomplete_utf8_is_held_back(plain: Scripted) -> None:
    plain.says("a🙂b", finish="length")
    assert len(ids("🙂")) == 4, "a token for each byte"
    for chunks in (
        plain.openai.completions.create(**ASK, stream=True),
        plain.openai.chat.completions.create(**CHAT, stream=True),
    ):
        pieces = [text_of([chunk]) for chunk in chunks]
        assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]


@pytest.mark.parametrize("n", [1, 2])
def test_wire_6_an_error_in_mid_stream_is_raised_by_the_sdk(plain: Scripted, n: int) -> None:
    plain.plays([*play(ids("ab"), finish=None), EngineError("broken off")])
    for api, body in ((plain.openai.chat.completions, CHAT), (plain.openai.completions, ASK)):
        chunks: list[Any] = []
        with pytest.raises(openai.APIError, match="broken off") as failure:
            chunks.extend(api.create(**body, n=n, stream=True))
        assert text_of(chunks).startswith("a"), "what was told before it stays told"
        assert failure.value.code == "engine_error"


def test_wire_6_the_error_frame(plain: Scripted) -> None:
    plain.plays([*play(ids("ab"), finish=None), EngineError("broken off")])
    frames = events(plain.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).content)
    error = {"message": "broken off", "type": "server_error", "param": None, "code": "engine_error"}
    assert frames[-1] == {"error": error}


def test_wire_6_other_apis_tell_of_it_in_their_own_form(plain: Scripted) -> None:
    plain.plays([*play(ids("ab"), finish=None), EngineError("broken off")])
    with plain.openai.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.failed"
    with (
        pytest.raises(anthropic.APIStatusError, match="broken off"),
        plain.anthropic.messages.stream(**CHAT, max_tokens=9) as messages,
    ):
        messages.until_done()


def test_wire_7_tool_call_deltas(tool: Scripted) -> None:
    tool.says(f"I look.\n{CALL}\n{OTHER_CALL}")
    chunks = [chunk.choices[0] for chunk in tool.openai.chat.completions.create(**CHAT, tools=TOOLS, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    assert chunks[-1].finish_reason == "tool_calls"
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    assert all(type(delta.index) is int for delta in deltas)
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    for index, arguments in ((0, '{"city": "Köln"}'), (1, '{"city": "Bonn"}')):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert first.id.startswith("call_")
        assert (first.type, first.function.name, first.function.arguments) == ("function", "weather", "")
        assert len(rest) > 3, "arguments come in pieces"
        for delta in rest:
            assert delta.model_dump(exclude_unset=True).keys() == {"index", "function"}
            assert delta.function.model_dump(exclude_unset=True).keys() == {"arguments"}
        assert "".join(delta.function.arguments for delta in rest) == arguments
    assert len({delta.id for delta in deltas if delta.id}) == 2
