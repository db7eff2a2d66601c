"""What requests make of prompts and parameters, and what a client reads beside an answer (tests/wire has the rest)."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tessera.app.generate.sampling import SamplingDefaults, load_sampling_defaults
from tessera.app.server.http_server import freeze_what_is_loaded
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import EngineError
from tessera.engine.contract.heap import OldGarbage
from tessera.engine.contract.messages import RequestOutput
from tests.engine.gguf.writer import write_gguf
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, events, ids, serve, settings_for, write_model_folder

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
HELLO = play([*ids("hello wörld"), 0], stop_token_id=0, num_cached_tokens=16)


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


def complete(settings: AppSettings, outputs: Sequence[Any] = HELLO, **body: Any) -> httpx.Response:
    return call(FakeClient(always(outputs)), settings, "POST", "/v1/completions", json={**TEXT, **body})


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


def test_one_failed_choice_fails_the_request_and_aborts_the_others(settings: AppSettings) -> None:
    def script(submission: Any) -> list[Any]:
        return [EngineError("broken")] if len(client.submissions) == 2 else play(ids("ab"), finish=None)

    client = FakeClient(script, hang=True)
    response = call(client, settings, "POST", "/v1/completions", json={**TEXT, "n": 3})
    assert response.status_code == 500
    assert [s.aborted.is_set() for s in client.submissions] == [True, False, True]


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


def prompt_text(settings: AppSettings, **body: Any) -> str:
    response = call(FakeClient(always(HELLO)), settings, "POST", "/tokenize", json=body)
    assert response.status_code == 200, response.text
    tokens = {"tokens": response.json()["tokens"]}
    text = call(FakeClient(always(HELLO)), settings, "POST", "/detokenize", json=tokens).json()["prompt"]
    assert isinstance(text, str)
    return text


def test_tool_call_arguments_and_reasoning_reach_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}{{ m.reasoning_content }}{% endfor %}"
    settings = settings_for(write_model_folder(tmp_path, template=template))
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 17}'}}
    for field in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": None, "tool_calls": [made], field: "why"}
        assert prompt_text(settings, messages=[message]) == "17why"


def test_chat_template_kwargs_reach_the_template(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path, template="{{ mood }}{{ messages[0].content }}"))
    messages = [{"role": "user", "content": "x"}]
    assert prompt_text(settings, messages=messages, chat_template_kwargs={"mood": "calm "}) == "calm x"


def test_sampling_fields_reach_the_engine(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    fields = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.125,
        "top_n_sigma": 1.5,
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


def test_generation_config_may_ask_for_greedy(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, temperature=0.6, do_sample=False)
    client = FakeClient(always(HELLO))
    call(client, settings_for(folder), "POST", "/v1/completions", json=TEXT)
    call(client, settings_for(folder), "POST", "/v1/completions", json={**TEXT, "temperature": 0.5})
    assert [submission.params.temperature for submission in client.submissions] == [0.0, 0.5]


def test_gguf_metadata_may_have_the_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recommended = {"temp": 0.6, "top_k": -1, "top_p": 0.95, "penalty_repeat": 1.1, "min_p": 0.05}
    others = {"xtc_threshold": 0.1, "sequence": "top_k;temp"}
    keys = {f"general.sampling.{name}": value for name, value in {**recommended, **others}.items()}
    defaults = load_sampling_defaults(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", **keys}))
    assert defaults == SamplingDefaults(temperature=0.6, top_k=0, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    assert "general.sampling.sequence, general.sampling.xtc_threshold are left out" in caplog.text
    keys = {"general.sampling.temp": 0.0, "general.sampling.top_p": 7.0, "general.sampling.top_k": 40}
    defaults = load_sampling_defaults(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", **keys}))
    assert defaults == SamplingDefaults(temperature=0.0, top_k=40)
    assert "top_p is left out" in caplog.text


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
    with serve(FakeClient(always(HELLO)), settings) as url:  # one server: `created` is when it started
        listed = httpx.get(f"{url}/v1/models").json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "tessera")
        assert isinstance(model["created"], int)
        assert httpx.get(f"{url}/v1/models/tiny").json() == model


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
    assert "tessera:engine_up 1.0\n" in text
    client.well = client.ready = False
    unwell = call(client, settings, "GET", "/health")
    assert (unwell.status_code, unwell.json()["reason"]) == (503, "the engine is starting")
    assert call(client, settings, "GET", "/ready").status_code == 503
    assert "tessera:engine_up 0.0\n" in call(client, settings, "GET", "/metrics").text


def test_wire_metrics_may_have_the_prefix_of_other_dashboards(tmp_path: Path) -> None:
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


def test_garbage_is_collected_again_once_a_server_serves() -> None:
    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    gc.disable()  # as the start of a server does
    try:
        freeze_what_is_loaded(OldGarbage(), lambda: True)
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
