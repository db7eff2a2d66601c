"""Points 8 to 18: what answers, errors and headers are made of, and what a request may say."""

from __future__ import annotations

import socket
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from tessera.app.openai.envelope import system_fingerprint
from tessera.engine.contract.errors import ContextLengthError, EngineError, QueueFullError
from tests.support.fakes.fake_client import INFO, play
from tests.support.servers.http_fixtures import ids
from tests.support.servers.surface_fixtures import CALL, OTHER_CALL
from tests.wire.conftest import TEXT, Scripted
from tests.wire.requests import ASK, CHAT, TOOLS

NUM_TOKENS = len(ids(TEXT)) + 1
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def said(content: Any, role: str = "user", **fields: Any) -> Any:
    return {**CHAT, "messages": [{"role": role, "content": content, **fields}]}


# -- 8: why an answer ended -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "finish", "choice", "reason"),
    [
        ("Sunny.", "stop", "auto", "stop"),
        ("Sunny", "length", "auto", "length"),
        (CALL, "stop", "auto", "tool_calls"),
        (CALL + OTHER_CALL, "stop", "auto", "tool_calls"),
        (CALL, "stop", "none", "stop"),
        (CALL, "stop", "required", "tool_calls"),
        (CALL, "stop", NAMED, "stop"),  # as the API says for a function that the request named
        (CALL[:60], "length", "auto", "length"),
        (CALL[:60], "length", "required", "length"),
        (CALL[:60], "length", NAMED, "length"),
        ("<tool_call>{nothing}</tool_call>", "stop", "auto", "stop"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_wire_8_finish_reason(tool: Scripted, text: str, finish: str, choice: Any, reason: str, stream: bool) -> None:
    tool.says(text, finish=finish)
    answer: Any = tool.openai.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        reasons = [chunk.choices[0].finish_reason for chunk in answer]
        assert reasons == [None] * (len(reasons) - 1) + [reason]
    else:
        assert answer.choices[0].finish_reason == reason


def test_wire_8_a_call_cut_by_the_token_limit_keeps_what_there_is(tool: Scripted) -> None:
    tool.says(CALL[:60], finish="length")
    choice = tool.openai.chat.completions.create(**CHAT, tools=TOOLS).choices[0]
    (made,) = choice.message.tool_calls or []
    assert '{"city": "Köln"}'.startswith(made.function.arguments)
    assert made.function.arguments != '{"city": "Köln"}'


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_wire_8_a_forced_call_is_made(tool: Scripted, choice: Any) -> None:
    tool.says(CALL)
    message = tool.openai.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice).choices[0].message
    assert message.content is None
    assert [made.function.name for made in message.tool_calls or []] == ["weather"]
    grammar = tool.params.grammar
    assert grammar is not None, "the engine sees to it that the call is made"
    assert "weather" in grammar.text


# -- 9: errors ------------------------------------------------------------------------------------


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, "all four are there"
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["message"]
    return error


def test_wire_9_validation_is_400_and_names_the_field(plain: Scripted) -> None:
    for api, body in ((plain.openai.chat.completions, CHAT), (plain.openai.completions, ASK)):
        with pytest.raises(openai.BadRequestError) as refused:
            api.create(**body, temperature=2.5)
        assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    error = error_of(plain.http.post("/v1/chat/completions", json={"model": "tiny"}), 400)
    assert error["param"] == "messages"
    assert error_of(plain.http.post("/v1/completions", json=[1]), 400)["param"] is None
    assert not plain.engine.submissions, "nothing was asked of the engine"


def test_wire_9_unknown_model(plain: Scripted) -> None:
    for api, body in (
        (plain.openai.chat.completions, CHAT),
        (plain.openai.completions, ASK),
        (plain.openai.responses, {"input": "hi"}),
        (plain.openai.embeddings, {"input": "hi"}),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            api.create(**{**body, "model": "gpt-4o"})
        assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as missing:
        plain.openai.models.retrieve("gpt-4o")
    assert missing.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError):
        plain.anthropic.messages.create(**{**CHAT, "model": "claude"}, max_tokens=5)


def test_wire_9_bad_or_missing_key(locked: Scripted) -> None:
    with pytest.raises(openai.AuthenticationError) as denied:
        locked.openai.chat.completions.create(**CHAT)
    assert denied.value.code == "invalid_api_key"
    response = locked.http.post("/v1/chat/completions", json=CHAT)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    with pytest.raises(anthropic.AuthenticationError):
        locked.anthropic.messages.create(**CHAT, max_tokens=5)
    assert not locked.engine.submissions
    assert locked.openai.with_options(api_key="right").completions.create(**ASK).choices[0].text == TEXT
    assert locked.anthropic.with_options(api_key="right").messages.create(**CHAT, max_tokens=5).content[0].text == TEXT


@pytest.mark.parametrize(
    "body", [{"prompt": [5] * 2048}, {"prompt": [5] * 2000, "max_tokens": 2049}, {"prompt": "x y" * 2000}], ids=str
)
def test_wire_9_too_long_a_prompt(plain: Scripted, body: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        plain.openai.completions.create(**{**ASK, **body})
    assert refused.value.code == "context_length_exceeded"
    assert not plain.engine.submissions
    plain.plays([ContextLengthError("too long", param="prompt")])
    with pytest.raises(openai.BadRequestError) as refused:
        plain.openai.completions.create(**ASK)
    assert refused.value.code == "context_length_exceeded", "also where the engine says so"


@pytest.mark.parametrize("stream", [False, True])
def test_wire_9_a_full_queue_says_when_to_come_back(plain: Scripted, stream: bool) -> None:
    plain.plays([QueueFullError("full", retry_after=7)])
    with pytest.raises(openai.RateLimitError) as full:
        plain.openai.chat.completions.create(**CHAT, stream=stream)
    assert full.value.code == "queue_full"
    assert full.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
def test_wire_9_an_engine_that_is_not_ready(plain: Scripted, stream: bool) -> None:
    plain.engine.well = False
    try:
        with pytest.raises(openai.InternalServerError) as unready:
            plain.openai.chat.completions.create(**CHAT, stream=stream)
    finally:
        plain.engine.well = True
    assert (unready.value.status_code, unready.value.code) == (503, "engine_unavailable")
    assert int(unready.value.response.headers["retry-after"]) > 0


def test_wire_9_a_failure_of_the_engine_is_500_before_the_first_token(plain: Scripted) -> None:
    plain.plays([EngineError("broken")])
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as failure:
            plain.openai.completions.create(**ASK, stream=stream)
        assert (failure.value.status_code, failure.value.code) == (500, "engine_error")


# -- 10 and 11: choices, usage, logprobs ----------------------------------------------------------


def test_wire_10_the_fingerprint_is_another_for_other_numbers() -> None:
    others = ({"dtype": "float16"}, {"stored_bytes": {"INT4": 9}}, {"weight_bytes": 9}, {"device_name": "another"})
    changed = {system_fingerprint(msgspec.structs.replace(INFO, **other)) for other in others}
    assert len(changed | {system_fingerprint(INFO)}) == 1 + len(others)
    assert system_fingerprint(msgspec.structs.replace(INFO, load_seconds=7.5)) == system_fingerprint(INFO)


def test_wire_10_choice_message_and_usage_have_every_field(plain: Scripted) -> None:
    answer = plain.http.post("/v1/chat/completions", json=CHAT).json()
    assert (answer["object"], answer["model"], answer["service_tier"]) == ("chat.completion", "tiny", None)
    assert answer["id"].startswith("chatcmpl-")
    assert type(answer["created"]) is int
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = answer["usage"]
    assert usage["completion_tokens"] == NUM_TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + NUM_TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_wire_10_text_completion(plain: Scripted) -> None:
    answer = plain.http.post("/v1/completions", json=ASK).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"text": TEXT, "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == len(ids("hi"))


@pytest.mark.parametrize("stream", [False, True])
def test_wire_11_chat_logprobs_have_the_tokens_raw_bytes(plain: Scripted, stream: bool) -> None:
    plain.says("aü🙂", logprobs=True)
    answer: Any = plain.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    given = [choice.logprobs for choice in choices if choice.logprobs]
    entries = [entry for logprobs in given for entry in logprobs.content]
    assert [bytes(entry.bytes) for entry in entries] == [b"a", b"\xc3", b"\xbc", b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert all("\ufffd" not in entry.token for entry in entries)
    assert {entry.logprob for entry in entries} == {-0.5}
    for entry in entries:
        own, other = entry.top_logprobs
        assert (own.token, own.bytes, own.logprob) == (entry.token, entry.bytes, entry.logprob)
        assert (bytes(other.bytes), other.logprob) == (b"<|im_start|>", -9999.0), "JSON has no infinity"
    assert all(logprobs.refusal is None and "refusal" in logprobs.model_fields_set for logprobs in given)
    if stream:
        texts = [choice.delta.content for choice in choices if choice.logprobs and choice.delta.content]
        assert texts == ["a", "ü", "🙂"], "each with the text that its tokens are"


def test_wire_11_top_logprobs_go_from_0_to_20(plain: Scripted) -> None:
    plain.says("a", logprobs=True)
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        (entry,) = plain.openai.chat.completions.create(**CHAT, **fields).choices[0].logprobs.content
        assert entry.top_logprobs == []
    plain.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=20)
    assert plain.params.logprobs == 20
    wrong: list[dict[str, Any]] = [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}]
    for fields in (*wrong, {"logprobs": False, "top_logprobs": 2}):
        with pytest.raises(openai.BadRequestError) as refused:
            plain.openai.chat.completions.create(**CHAT, **fields)
        assert refused.value.param == "top_logprobs"


def test_wire_11_completion_logprobs(plain: Scripted) -> None:
    plain.says("aü", finish="length", logprobs=True)
    logprobs = plain.openai.completions.create(**ASK, logprobs=1).choices[0].logprobs
    assert logprobs.model_dump() == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xbc"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xbc": -0.5}],
        "text_offset": [0, 1, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_wire_11_echo_begins_with_the_prompt(plain: Scripted, stream: bool) -> None:
    answer: Any = plain.openai.completions.create(model="tiny", prompt=["one ", "two "], echo=True, stream=stream)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [f"one {TEXT}", f"two {TEXT}"]


# -- 12 to 14: what a request may say -------------------------------------------------------------


def test_wire_12_both_names_of_the_token_limit_and_null(plain: Scripted) -> None:
    api = plain.openai.chat.completions
    api.create(**CHAT)
    room = plain.params.max_tokens
    assert room == 2048 - len(plain.engine.submissions[-1].prompt), "the rest of the context"
    for fields, limit in (
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"max_completion_tokens": None, "max_tokens": 9}, 9),
        ({"max_completion_tokens": None, "max_tokens": None}, room),
    ):
        api.create(**CHAT, **fields)
        assert plain.params.max_tokens == limit, fields


def test_wire_12_null_equals_omitted(plain: Scripted) -> None:
    described = plain.http.get("/openapi.json").json()["components"]["schemas"]
    for path, body, name in (
        ("/v1/chat/completions", CHAT, "ChatCompletionRequest"),
        ("/v1/completions", ASK, "CompletionRequest"),
    ):
        nulls = {field: None for field in described[name]["properties"] if field not in body}
        assert len(nulls) > 25
        for fields in ({}, {"seed": None, **nulls}):
            response = plain.http.post(path, json={**body, **fields})
            assert response.status_code == 200, response.text
        omitted, null = plain.engine.submissions[-2:]
        assert (omitted.prompt, omitted.priority, omitted.cache_salt) == (null.prompt, null.priority, null.cache_salt)
        assert msgspec.structs.replace(omitted.params, seed=null.params.seed) == null.params, "seeds are drawn"


def test_wire_12_stop_is_a_string_or_several(plain: Scripted) -> None:
    def told(stop: Any) -> str:
        return plain.openai.completions.create(**ASK, stop=stop).choices[0].text

    assert told(" w") == told([" w"]) == told([*"abcdfgijkm", " w"]) == "hello"
    assert told(None) == told([]) == TEXT
    for wrong in (["a"] * 65, "", [""], [1]):
        with pytest.raises(openai.BadRequestError) as refused:
            told(wrong)
        assert refused.value.param == "stop"


def test_wire_13_developer_is_system_and_content_has_its_forms(tool: Scripted) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": "so?"},
    ]
    tool.openai.chat.completions.create(model="tiny", messages=messages)
    assert tool.prompt == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>weather Ulm</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("dumped", [False, True])
def test_wire_13_an_answer_can_be_sent_back_as_it_came(tool: Scripted, dumped: bool) -> None:
    tool.says(f"<think>hm</think>I look.\n{CALL}")
    message: Any = tool.openai.chat.completions.create(**CHAT, tools=TOOLS).choices[0].message
    (made,) = message.tool_calls
    message = message.model_dump() if dumped else message  # with a null for every field that it does not have
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
    tool.openai.chat.completions.create(model="tiny", messages=[*CHAT["messages"], message, result], tools=TOOLS)
    assert "<think>hm</think>I look.<tool_call>weather Köln</tool_call>" in tool.prompt


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
    ],
    ids=str,
)
def test_wire_13_what_a_role_needs_is_named(plain: Scripted, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        plain.openai.chat.completions.create(model="tiny", messages=[message])
    assert refused.value.param == param


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "json_schema"),
    ],
    ids=str,
)
def test_wire_14_forms_reach_the_engine(plain: Scripted, form: Any, kind: str | None) -> None:
    plain.openai.chat.completions.create(**CHAT, response_format=form)
    grammar = plain.params.grammar
    assert (grammar.kind if grammar else None) == kind


@pytest.mark.parametrize(
    "form",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
    ],
    ids=str,
)
def test_wire_14_other_forms_are_refused(plain: Scripted, form: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        plain.openai.chat.completions.create(**CHAT, response_format=form)
    assert (refused.value.param or "").startswith("response_format")
    assert not plain.engine.submissions


# -- 16 to 18 -------------------------------------------------------------------------------------


def test_wire_16_reasoning_has_both_names_whole_and_streamed(tool: Scripted) -> None:
    tool.says("<think>\nhm, so\n</think>\n\nHello")
    message: Any = tool.openai.chat.completions.create(**CHAT).choices[0].message
    assert message.reasoning == message.reasoning_content == "hm, so"
    assert message.content == "Hello"
    chunks = list(tool.openai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [delta for delta in deltas if "reasoning" in delta.model_extra]
    assert len(thoughts) > 2
    assert "".join(delta.reasoning for delta in thoughts) == "hm, so"
    assert all(delta.reasoning == delta.reasoning_content for delta in thoughts)
    assert "".join(delta.content or "" for delta in deltas) == "Hello"
    details = chunks[-1].usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < chunks[-1].usage.completion_tokens


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_wire_16_reasoning_is_accepted_back(tool: Scripted, field: str) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "a", field: "hm"}, {"role": "user", "content": "b"}]
    tool.openai.chat.completions.create(model="tiny", messages=messages)
    assert "<think>hm</think>a" in tool.prompt


def test_wire_17_unknown_fields_are_ignored_and_known_ones_are_strict(plain: Scripted) -> None:
    plain.openai.chat.completions.create(**CHAT, extra_body={"unheard_of": {"a": 1}})
    plain.openai.completions.create(**ASK, extra_body={"unheard_of": [1]})
    plain.openai.chat.completions.create(**said("hi", unheard_of=1))
    plain.openai.responses.create(model="tiny", input="hi", extra_body={"unheard_of": 1})
    plain.anthropic.messages.create(**CHAT, max_tokens=5, extra_body={"unheard_of": 1})
    asked = len(plain.engine.submissions)
    for field, value in (("temperature", "warm"), ("n", True), ("stream", "yes"), ("max_tokens", "5"), ("seed", 1.5)):
        for api, body in ((plain.openai.chat.completions, CHAT), (plain.openai.completions, ASK)):
            with pytest.raises(openai.BadRequestError) as refused:
                api.create(**body, extra_body={field: value})
            assert refused.value.param == field
    assert len(plain.engine.submissions) == asked


def test_wire_17_images_are_refused_and_nothing_is_fetched(plain: Scripted) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/cat.png"
        with pytest.raises(openai.BadRequestError, match="image_url") as refused:
            plain.openai.chat.completions.create(**said([{"type": "image_url", "image_url": {"url": url}}]))
        assert refused.value.param == "messages[0].content"
        content: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        with pytest.raises(openai.BadRequestError, match="input_image"):
            plain.openai.responses.create(model="tiny", input=content)
        source = {"type": "url", "url": url}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
            plain.anthropic.messages.create(**said([{"type": "image", "source": source}]), max_tokens=5)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not plain.engine.submissions


def test_wire_18_every_answer_has_the_servers_own_request_id(plain: Scripted) -> None:
    headers = {"x-request-id": "mine"}
    answers = [
        plain.http.get("/health", headers=headers),
        plain.http.get("/nowhere", headers=headers),
        plain.http.get("/metrics", headers=headers),
        plain.http.post("/v1/completions", json=ASK, headers=headers),
        plain.http.post("/v1/completions", json={**ASK, "stream": True}, headers=headers),
        plain.http.post("/v1/completions", json={**ASK, "n": 0}, headers=headers),
        plain.http.post("/v1/messages", json={**CHAT, "max_tokens": 5}, headers=headers),
        plain.http.post("/v1/completions", content=b"x" * 10, headers=headers),
    ]
    assert all(answer.headers["x-client-request-id"] == "mine" for answer in answers), "echoed apart"
    own = [answer.headers["x-request-id"] for answer in answers]
    assert all(request_id.startswith("req_") for request_id in own)
    assert len(set(own)) == len(own)


def test_wire_18_a_refused_key_has_a_request_id_too(locked: Scripted) -> None:
    with pytest.raises(openai.AuthenticationError) as denied:
        locked.openai.models.list()
    assert (denied.value.request_id or "").startswith("req_")


def test_wire_18_the_sdks_show_the_request_id(plain: Scripted) -> None:
    answer = plain.openai.chat.completions.create(**CHAT)
    assert answer._request_id.startswith("req_")
    raw = plain.openai.chat.completions.with_raw_response.create(**CHAT)
    assert raw.request_id == raw.headers["x-request-id"]
    with plain.openai.completions.with_streaming_response.create(**ASK) as streamed:
        assert streamed.headers["x-request-id"].startswith("req_")
        assert streamed.parse().choices[0].text == TEXT
    with pytest.raises(openai.NotFoundError) as missing:
        plain.openai.models.retrieve("x")
    assert (missing.value.request_id or "").startswith("req_")
    message = plain.anthropic.messages.create(**CHAT, max_tokens=5)
    assert (message._request_id or "").startswith("req_")


def test_wire_18_requests_of_one_client_id_do_not_meet(plain: Scripted) -> None:
    """Two answers at once under one client's id are told apart: that id is never a key."""
    plain.plays(play(ids("abc"), finish="length"))
    header = {"x-request-id": "same"}
    with (
        plain.openai.completions.create(**ASK, stream=True, extra_headers=header) as one,
        plain.openai.completions.create(**ASK, stream=True, extra_headers=header) as two,
    ):
        chunks = [(next(one), next(two)) for _ in range(3)]
    assert [(a.choices[0].text, b.choices[0].text) for a, b in chunks] == [("a", "a"), ("b", "b"), ("c", "c")]
    assert chunks[0][0].id != chunks[0][1].id


@pytest.mark.parametrize("hostile", [b"a\tb", b"x" * 513, b"", "ü".encode()])
def test_wire_18_ids_that_could_do_harm_are_not_echoed(plain: Scripted, hostile: bytes) -> None:
    answer = plain.http.get("/health", headers=[(b"x-request-id", hostile)])
    assert "x-client-request-id" not in answer.headers
    assert answer.headers["x-request-id"].startswith("req_")
