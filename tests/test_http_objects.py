"""WIRE points 1 to 6, 8, 10 to 13 and 16: the objects that clients read, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.settings import AppSettings
from engine.errors import EngineError
from engine.messages import RequestOutput
from tests.fake_client import FakeClient, always, play
from tests.http_fixtures import call, events, ids, settings_for, write_model_folder

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
HELLO = play([*ids("hello wörld"), 0], stop_token_id=0, num_cached_tokens=16)


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


def chat(settings: AppSettings, outputs: Sequence[Any] = HELLO, **body: Any) -> httpx.Response:
    return call(FakeClient(always(outputs)), settings, "POST", "/v1/chat/completions", json={**CHAT, **body})


def complete(settings: AppSettings, outputs: Sequence[Any] = HELLO, **body: Any) -> httpx.Response:
    return call(FakeClient(always(outputs)), settings, "POST", "/v1/completions", json={**TEXT, **body})


def test_chat_completion_object(settings: AppSettings) -> None:
    answer = chat(settings).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert isinstance(answer["created"], int)
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["service_tier"] is None
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello wörld", "refusal": None, "annotations": []}
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "stop"
    num_tokens = len(ids("hello wörld")) + 1
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_text_completion_object(settings: AppSettings) -> None:
    answer = complete(settings).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"text": "hello wörld", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 2


def test_wire_1_and_2_chat_stream(settings: AppSettings) -> None:
    response = chat(settings, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.content)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello wörld"
    assert all("usage" not in chunk for chunk in chunks)
    assert all(choice["logprobs"] is None for choice in choices)


def test_wire_3_include_usage(settings: AppSettings) -> None:
    chunks = events(chat(settings, stream=True, stream_options={"include_usage": True}).content)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids("hello wörld")) + 1
    text_chunks = events(complete(settings, stream=True, stream_options={"include_usage": True}).content)
    assert text_chunks[-1]["choices"] == []
    assert text_chunks[0]["usage"] is None


def test_continuous_usage_counts_up(settings: AppSettings) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(complete(settings, stream=True, stream_options=options).content)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1


@pytest.mark.parametrize("path", ["chat", "text"])
def test_wire_3_stream_options_without_stream(settings: AppSettings, path: str) -> None:
    post = chat if path == "chat" else complete
    response = post(settings, stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_wire_4_choices_interleave(settings: AppSettings) -> None:
    chunks = events(chat(settings, stream=True, n=3, stream_options={"include_usage": True}).content)
    usage = chunks.pop()["usage"]
    assert usage["completion_tokens"] == 3 * (len(ids("hello wörld")) + 1)
    texts = ["", "", ""]
    order = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        order.append(choice["index"])
    assert texts == ["hello wörld"] * 3
    assert order != sorted(order), "all of one choice came before the next"
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 3


def test_the_servers_seed_is_for_requests_without_one(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    settings = msgspec.structs.replace(settings, seed=7)
    for body in ({"n": 2}, {"n": 2}, {"seed": 3}, {"seed": None}):
        call(client, settings, "POST", "/v1/completions", json={**TEXT, **body})
    assert [submission.params.seed for submission in client.submissions] == [7, 8, 7, 8, 3, 7]


def test_seeds_of_choices_count_up(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    call(client, settings, "POST", "/v1/completions", json={**TEXT, "n": 3, "seed": -1})
    assert [s.params.seed for s in client.submissions] == [2**64 - 1, 0, 1]
    client = FakeClient(always(HELLO))
    call(client, settings, "POST", "/v1/completions", json={**TEXT, "n": 3})
    assert len({s.params.seed for s in client.submissions}) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_output", [1, 4])
def test_wire_5_stop_strings_never_leak_and_end_the_work(settings: AppSettings, stream: bool, per_output: int) -> None:
    outputs = play(ids("hello wörld and more"), finish=None, per_output=per_output)
    client = FakeClient(always(outputs), hang=True)
    body = {**TEXT, "stop": ["rld a", "xyz"], "stream": stream}
    response = call(client, settings, "POST", "/v1/completions", json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response.content)]
        assert "".join(choice["text"] for choice in choices) == "hello wö"
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert response.json()["choices"][0] == {
            "text": "hello wö",
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert response.json()["usage"]["completion_tokens"] == len(ids("hello wörld a"))
    assert client.submissions[0].aborted.is_set()


def test_include_stop_str_in_output(settings: AppSettings) -> None:
    answer = complete(settings, stop="wö", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "hello wö"


def test_wire_5_incomplete_utf8_is_held_back(settings: AppSettings) -> None:
    outputs = play(ids("a🙂b"), finish="length")
    chunks = events(complete(settings, outputs, stream=True).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "🙂", "b", ""]


def test_wire_6_error_in_mid_stream(settings: AppSettings) -> None:
    outputs = [*play(ids("ab"), finish=None), EngineError("the logits were not finite")]
    chunks = events(chat(settings, outputs, stream=True).content)
    assert chunks[-1] == {
        "error": {
            "message": "the logits were not finite",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
    }
    assert chunks[-2]["choices"][0]["delta"] == {"content": "b"}


def test_an_error_before_the_first_token_has_its_own_status(settings: AppSettings) -> None:
    response = chat(settings, [EngineError("broken")], stream=True)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"


def test_one_failed_choice_fails_the_request_and_aborts_the_others(settings: AppSettings) -> None:
    def script(submission: Any) -> list[Any]:
        return [EngineError("broken")] if len(client.submissions) == 2 else play(ids("ab"), finish=None)

    client = FakeClient(script, hang=True)
    response = call(client, settings, "POST", "/v1/completions", json={**TEXT, "n": 3})
    assert response.status_code == 500
    assert [s.aborted.is_set() for s in client.submissions] == [True, False, True]


def test_wire_8_length(settings: AppSettings) -> None:
    answer = chat(settings, play(ids("ab"), finish="length")).json()
    assert answer["choices"][0]["finish_reason"] == "length"


def test_wire_11_chat_logprobs(settings: AppSettings) -> None:
    outputs = play([*ids("ü"), 0], stop_token_id=0, logprobs=True)
    answer = chat(settings, outputs, logprobs=True, top_logprobs=2).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert [entry["bytes"] for entry in logprobs["content"]] == [[0xC3], [0xBC]]
    first = logprobs["content"][0]
    assert first["token"] == "\\xc3"
    assert first["logprob"] == -0.5
    assert first["top_logprobs"][1] == {
        "token": "<|im_start|>",
        "logprob": -9999.0,
        "bytes": list(b"<|im_start|>"),
    }


def test_wire_11_logprobs_without_alternatives(settings: AppSettings) -> None:
    outputs = play(ids("a"), finish="length", logprobs=True)
    (entry,) = chat(settings, outputs, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert entry == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def test_wire_11_streamed_logprobs_go_with_their_text(settings: AppSettings) -> None:
    outputs = play(ids("aü"), finish="length", logprobs=True)
    chunks = events(chat(settings, outputs, stream=True, logprobs=True).content)
    seen = [
        (choice["delta"]["content"], [entry["bytes"] for entry in choice["logprobs"]["content"]])
        for choice in (chunk["choices"][0] for chunk in chunks[1:-1])
        if choice["delta"]["content"]
    ]
    assert seen == [("a", [[97]]), ("ü", [[0xC3], [0xBC]])]


def test_wire_11_completion_logprobs(settings: AppSettings) -> None:
    outputs = play(ids("aü"), finish="length", logprobs=True)
    logprobs = complete(settings, outputs, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xbc"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xbc": -0.5}],
        "text_offset": [0, 1, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_echo(settings: AppSettings, stream: bool) -> None:
    response = complete(settings, prompt=["one ", ids("two ")], echo=True, stream=stream)
    texts = ["", ""]
    for answer in events(response.content) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["one hello wörld", "two hello wörld"]


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2}
    answer = call(client, settings, "POST", "/v1/completions", json=body).json()
    assert [s.prompt for s in client.submissions] == [ids("a"), ids("a"), ids("b"), ids("b")]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("prompt", ["hi", ["hi"], ids("hi"), [ids("hi")]])
def test_prompt_forms(settings: AppSettings, prompt: Any) -> None:
    client = FakeClient(always(HELLO))
    assert call(client, settings, "POST", "/v1/completions", json={**TEXT, "prompt": prompt}).status_code == 200
    assert [s.prompt for s in client.submissions] == [ids("hi")]


def test_wire_12_newer_name_and_null(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    body = {**CHAT, "max_completion_tokens": 7, "max_tokens": None, "temperature": None, "n": None, "stop": None}
    assert call(client, settings, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert client.submissions[0].params.max_tokens == 7
    client = FakeClient(always(HELLO))
    call(client, settings, "POST", "/v1/chat/completions", json={**CHAT, "max_completion_tokens": None})
    submission = client.submissions[0]
    assert submission.params.max_tokens == 128 - len(submission.prompt), "the rest of the context"


def prompt_text(settings: AppSettings, **body: Any) -> str:
    response = call(FakeClient(always(HELLO)), settings, "POST", "/tokenize", json=body)
    assert response.status_code == 200, response.text
    tokens = {"tokens": response.json()["tokens"]}
    text = call(FakeClient(always(HELLO)), settings, "POST", "/detokenize", json=tokens).json()["prompt"]
    assert isinstance(text, str)
    return text


def test_wire_13_roles_and_contents(settings: AppSettings) -> None:
    call_made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call_made]},
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ]
    text = prompt_text(settings, messages=messages, add_generation_prompt=False)
    assert text == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nt<|im_end|>\n"
    )


def test_tool_call_arguments_and_reasoning_reach_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}{{ m.reasoning_content }}{% endfor %}"
    settings = settings_for(write_model_folder(tmp_path, template=template))
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 17}'}}
    for field in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": None, "tool_calls": [made], field: "why"}
        assert prompt_text(settings, messages=[message]) == "17why"


def test_continue_final_message(settings: AppSettings) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so "}]
    text = prompt_text(settings, messages=messages, continue_final_message=True)
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nso "


def test_chat_template_kwargs_reach_the_template(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path, template="{{ mood }}{{ messages[0].content }}"))
    messages = [{"role": "user", "content": "x"}]
    assert prompt_text(settings, messages=messages, chat_template_kwargs={"mood": "calm "}) == "calm x"


def test_return_token_ids(settings: AppSettings) -> None:
    answer = chat(settings, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [*ids("hello wörld"), 0]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    chunks = events(complete(settings, stream=True, return_token_ids=True).content)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids("hi")
    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert streamed == [*ids("hello wörld"), 0]


def test_sampling_fields_reach_the_engine(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    fields = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
    }
    others = {"logit_bias": {"5": -100}, "stop_token_ids": [7], "seed": 3, "logprobs": 4, "priority": -2}
    body = {**TEXT, **fields, **others}
    assert call(client, settings, "POST", "/v1/completions", json=body).status_code == 200
    (submission,) = client.submissions
    assert {name: getattr(submission.params, name) for name in fields} == fields
    assert submission.params.logit_bias == {5: -100.0}
    assert submission.params.stop_token_ids == (7,)
    assert (submission.params.seed, submission.params.logprobs, submission.priority) == (3, 4, -2)


def test_generation_config_applies_where_the_request_is_silent(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, do_sample=True)
    client = FakeClient(always(HELLO))
    call(client, settings_for(folder), "POST", "/v1/completions", json={**TEXT, "top_k": -1})
    params = client.submissions[0].params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 0, 0.95, 1.1)


@pytest.mark.parametrize(("keep", "kept"), [(2, "lo"), (-1, "hello"), (50, "hello")])
def test_truncate_prompt_tokens(settings: AppSettings, keep: int, kept: str) -> None:
    client = FakeClient(always(HELLO))
    body = {**TEXT, "prompt": [i for letter in "hello" for i in ids(letter)], "truncate_prompt_tokens": keep}
    assert call(client, settings, "POST", "/v1/completions", json=body).status_code == 200
    assert client.submissions[0].prompt == [i for letter in kept for i in ids(letter)]


def test_truncation_to_the_context_leaves_room_for_the_answer(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    body = {**TEXT, "prompt": [5] * 300, "truncate_prompt_tokens": -1, "max_tokens": 28}
    assert call(client, settings, "POST", "/v1/completions", json=body).status_code == 200
    assert len(client.submissions[0].prompt) == 100


def test_model_without_tokenizer_answers_in_token_ids(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    outputs = [RequestOutput("r", [7, 8]), RequestOutput("r", [9], finish_reason="length")]
    chunks = events(complete(settings, outputs, prompt=[1, 2], stream=True).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["7 8 ", "9 ", ""]
    assert complete(settings, outputs).json()["error"]["param"] == "prompt"


def test_models(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    listed = call(client, settings, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "tessera")
    assert isinstance(model["created"], int)
    assert call(client, settings, "GET", "/v1/models/tiny").json() == model


def test_model_names_with_slashes(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), served_model_names=("org/tiny", "t"))
    client = FakeClient(always(HELLO))
    assert call(client, settings, "GET", "/v1/models/org/tiny").json()["id"] == "org/tiny"
    body = {**TEXT, "model": "t"}
    assert call(client, settings, "POST", "/v1/completions", json=body).json()["model"] == "t"


def test_health_ready_version_metrics(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    assert call(client, settings, "GET", "/health").status_code == 200
    assert call(client, settings, "GET", "/ready").status_code == 200
    assert "version" in call(client, settings, "GET", "/version").json()
    text = call(client, settings, "GET", "/metrics").text
    assert "tessera:x 1\n" in text
    assert "tessera:engine_up 1\n" in text
    client.well = client.ready = False
    unwell = call(client, settings, "GET", "/health")
    assert (unwell.status_code, unwell.json()["reason"]) == (503, "the engine is starting")
    assert call(client, settings, "GET", "/ready").status_code == 503
    assert "tessera:engine_up 0\n" in call(client, settings, "GET", "/metrics").text


def test_metrics_prefix(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), metrics_prefix="vllm")
    text = call(FakeClient(always(HELLO)), settings, "GET", "/metrics").text
    assert "\nvllm:x 1\n" in text
    assert "# TYPE vllm:x counter" in text
    assert "tessera" not in text


def test_tokenize_and_detokenize(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    body = {"model": "tiny", "prompt": "hello", "return_token_strs": True}
    answer = call(client, settings, "POST", "/tokenize", json=body).json()
    assert answer == {"count": 1, "max_model_len": 128, "tokens": ids("hello"), "token_strs": ["hello"]}
    body = {"tokens": [*ids("wörld"), 0]}
    assert call(client, settings, "POST", "/detokenize", json=body).json() == {"prompt": "wörld<|im_end|>"}
