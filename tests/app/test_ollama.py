"""Ollama's API: what its clients send and read, with scripted tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tessera.app.ollama.messages import OllamaMessage, chat_messages
from tessera.app.ollama.models import short_count
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import EngineError
from tessera.engine.contract.messages import EmbeddingInfo
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import CALL, OTHER_CALL, ROOMY, cut_after, prompt_of, says, tool_settings

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It.", "parameters": {"type": "object"}}}]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
EMBEDDINGS = EmbeddingInfo(
    role="main", architecture="Fake", pooling="last", dimension=4, vocab_size=512, max_input_tokens=16
)
THINKING_TEMPLATE = (
    "{{ enable_thinking }} {{ reasoning_effort }}|{% for m in messages %}{{ m.content }}{% endfor %}<think>"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    return tool_settings(tmp_path_factory.mktemp("model"))


def post(client: FakeClient, settings: AppSettings, path: str, **body: Any) -> httpx.Response:
    return call(client, settings, "POST", path, json={"model": "tiny", **body})


def whole(client: FakeClient, settings: AppSettings, path: str = "/api/chat", **body: Any) -> Any:
    given = {"messages": HELLO} if path == "/api/chat" else {}
    response = post(client, settings, path, stream=False, **{**given, **body})
    assert response.status_code == 200, response.text
    return response.json()


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status
    (name, text), *_ = response.json().items()
    assert (name, len(response.json())) == ("error", 1)
    return str(text)


# -- what is sent back ------------------------------------------------------------------------------


def test_a_chat_is_streamed_unless_it_is_not_wanted(settings: AppSettings) -> None:
    *lines, last = lines_of(post(says("hello wörld"), settings, "/api/chat", messages=HELLO))
    assert [line["done"] for line in lines] == [False] * len(lines)
    assert "".join(line["message"]["content"] for line in lines) == "hello wörld"
    assert {line["model"] for line in lines} == {"tiny"}
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    answer = whole(says("hello wörld"), settings)
    assert answer["message"] == {"role": "assistant", "content": "hello wörld"}
    assert answer["done"] is True
    assert answer.keys() == last.keys()


def test_counts_and_times_are_measured(settings: AppSettings) -> None:
    client = says("hello")
    answer = whole(client, settings)
    assert all(type(answer[name]) is int and answer[name] > 0 for name in COUNTS)
    assert answer["prompt_eval_count"] == len(client.submissions[0].prompt)
    assert answer["eval_count"] == len(ids("hello")) + 1
    parts = [answer[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
    assert sum(parts) <= answer["total_duration"] < 60 * 10**9, "nanoseconds"


def test_a_completion_that_is_cut_says_so(settings: AppSettings) -> None:
    assert whole(cut_after("hello"), settings)["done_reason"] == "length"


def test_calls_are_whole_and_their_arguments_objects(settings: AppSettings) -> None:
    text = f"I look.{CALL}{OTHER_CALL}"
    answers = lines_of(post(says(text), settings, "/api/chat", messages=HELLO, tools=TOOLS))
    found = [found for line in answers for found in line["message"].get("tool_calls", ())]
    assert found == [
        {"id": found[index]["id"], "function": {"index": index, "name": "weather", "arguments": {"city": city}}}
        for index, city in enumerate(("Köln", "Bonn"))
    ]
    message = whole(says(text), settings, tools=TOOLS)["message"]
    assert message["content"] == "I look."
    assert [made["function"]["arguments"]["city"] for made in message["tool_calls"]] == ["Köln", "Bonn"]


def test_a_call_that_is_cut_is_left_out(settings: AppSettings) -> None:
    answer = whole(cut_after(CALL + OTHER_CALL[:40]), settings, tools=TOOLS)
    assert answer["done_reason"] == "length"
    assert len(answer["message"]["tool_calls"]) == 1


def test_reasoning_stands_apart(settings: AppSettings) -> None:
    message = whole(says("<think>hm</think>so"), settings, think=True)["message"]
    assert message == {"role": "assistant", "content": "so", "thinking": "hm"}
    answer = whole(says("<think>hm</think>so"), settings, "/api/generate", prompt="hello")
    assert (answer["thinking"], answer["response"]) == ("hm", "so")


@pytest.mark.parametrize(
    ("think", "shown"), [(True, "True "), (False, "False none"), ("high", "True high"), (None, " ")], ids=str
)
def test_think_reaches_the_template(tmp_path: Path, think: Any, shown: str) -> None:
    thinking = settings_for(write_model_folder(tmp_path, template=THINKING_TEMPLATE), reasoning_parser="think")
    client = says("hm</think>so")
    message = whole(client, thinking, think=think)["message"]
    assert prompt_of(client).partition("|")[0] == shown
    assert ("thinking" in message) == (think is not False), "what is not wanted is not shown"


def test_logprobs(settings: AppSettings) -> None:
    def script(submission: Any) -> Any:
        return play([*ids("hi"), 0], stop_token_id=0, logprobs=submission.params.logprobs is not None)

    answer = whole(FakeClient(script, info=ROOMY), settings, logprobs=True, top_logprobs=1)
    assert [entry["token"] for entry in answer["logprobs"]] == ["h", "i"]
    assert answer["logprobs"][0]["top_logprobs"] == [{"token": "h", "logprob": -0.5, "bytes": [104]}]


def test_a_stream_that_breaks_off_ends_with_the_error(settings: AppSettings) -> None:
    broken = FakeClient(always([*play(ids("ab"), finish=None), EngineError("broken off")]), info=ROOMY)
    *lines, last = lines_of(post(broken, settings, "/api/chat", messages=HELLO))
    assert "".join(line["message"]["content"] for line in lines) == "ab"
    assert last == {"error": "broken off"}


def test_a_prompt_that_is_too_long(settings: AppSettings) -> None:
    long = [{"role": "user", "content": "x " * 4000}]
    assert "the prompt is too long" in refusal(post(says("x"), settings, "/api/chat", messages=long))


# -- what is asked for ------------------------------------------------------------------------------


def test_options_reach_the_engine(settings: AppSettings) -> None:
    client = says("hello")
    options = {
        **{"num_predict": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["x", "y"]},
        **{"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
        **{"num_ctx": 4096, "num_gpu": 1, "mirostat": 0, "typical_p": 1.0},
    }
    whole(client, settings, options=options, keep_alive="5m")
    params = client.submissions[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (7, 0.5, 5, 0.9, 0.1)
    assert (params.seed, params.repetition_penalty) == (3, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert whole(says("hello x"), settings, options={"stop": "lo"})["message"]["content"] == "hel"


@pytest.mark.parametrize("num_predict", [-1, -2, 0, 2**31 - 1])
def test_num_predict_without_a_limit_takes_the_rest_of_the_context(settings: AppSettings, num_predict: int) -> None:
    client = says("hello")
    whole(client, settings, options={"num_predict": num_predict})
    (submission,) = client.submissions
    assert submission.params.max_tokens == ROOMY.max_model_len - len(submission.prompt)


def test_other_forms_of_options(settings: AppSettings) -> None:
    client = says("hello")
    whole(client, settings, options={"seed": -1, "repeat_penalty": 1.5, "repeat_last_n": 0, "stop": None})
    whole(client, settings, options={"seed": -1})
    first, second = [submission.params for submission in client.submissions]
    assert first.seed != second.seed, "-1 is a random seed"
    assert first.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("path", "field", "value", "text"),
    [
        ("chat", "options", {"mirostat": 1}, "mirostat is not supported"),
        ("chat", "options", {"typical_p": 0.7}, "typical_p is not supported"),
        ("chat", "options", {"temperature": "hot"}, "options.temperature must be a number."),
        ("chat", "options", {"stop": [1]}, "options.stop must be a string or a list of at most 64 strings."),
        ("chat", "think", "a lot", "think must be true, false, low, medium, high or max."),
        ("chat", "format", "yaml", 'format must be "json" or a JSON schema of at most 1024 keys.'),
        ("chat", "messages", [{"role": "robot"}], "messages[0].role must be one of"),
        ("generate", "template", "{{ .Prompt }}", "template is not supported"),
        ("generate", "suffix", "}", "suffix is not supported"),
        ("generate", "images", ["aGk="], "images cannot be used: this model reads text only."),
        ("generate", "context", [99999], "prompt has token id 99999"),
    ],
)
def test_what_is_wrong_is_named(settings: AppSettings, path: str, field: str, value: Any, text: str) -> None:
    body: dict[str, Any] = {"messages": HELLO} if path == "chat" else {"prompt": "hello"}
    assert text in refusal(post(says("x"), settings, f"/api/{path}", **{**body, field: value}))


def test_an_image_is_refused_at_first_and_left_out_later(settings: AppSettings) -> None:
    seen = {"role": "user", "content": "what is it?", "images": ["aGk="]}
    text = refusal(post(says("x"), settings, "/api/chat", messages=[seen]))
    assert text == "messages[0].images cannot be used: this model reads text only."
    client = says("x")
    whole(client, settings, messages=[seen, {"role": "assistant", "content": "a cat"}, *HELLO])
    assert "what is it?\n[An image was left out: this model reads text only.]" in prompt_of(client)


def test_format_is_enforced(settings: AppSettings) -> None:
    client = says("{}")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    for form in ("json", schema, ""):
        whole(client, settings, format=form)
    grammars = [submission.params.grammar for submission in client.submissions]
    assert [grammar and grammar.kind for grammar in grammars] == ["json_object", "json_schema", None]


def test_the_beginning_of_an_answer_is_continued(settings: AppSettings) -> None:
    client = says("x")
    whole(client, settings, messages=[*HELLO, {"role": "assistant", "content": "I think"}])
    assert prompt_of(client).endswith("<|im_start|>assistant\nI think")


def test_results_of_tools_find_their_calls() -> None:
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("weather", "time", "weather")]
    results = [{"role": "tool", "content": "x", "tool_name": name} for name in ("time", "weather", "weather", None)]
    given = [OllamaMessage.model_validate(one) for one in ({"role": "assistant", "tool_calls": calls}, *results)]
    first, *others = chat_messages(given)
    made = [made.id for made in first.tool_calls or ()]
    assert len(set(made)) == 3
    assert [message.tool_call_id for message in others] == [made[1], made[0], made[2], "call00000"]
    named = OllamaMessage.model_validate({"role": "tool", "content": "x", "tool_call_id": "mine"})
    assert chat_messages([named])[0].tool_call_id == "mine"


# -- generate ---------------------------------------------------------------------------------------


def test_generate_answers_a_prompt(settings: AppSettings) -> None:
    client = says("hello")
    *lines, last = lines_of(post(client, settings, "/api/generate", prompt="hi", system="Be brief."))
    assert "".join(line["response"] for line in lines) == "hello"
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(client) == expected
    assert last["context"] == [*client.submissions[0].prompt, *ids("hello"), 0]


def test_context_goes_before_the_prompt(settings: AppSettings) -> None:
    client = says("hello")
    context = whole(client, settings, "/api/generate", prompt="hi")["context"]
    again = whole(client, settings, "/api/generate", prompt="and?", context=context)
    prompt = client.submissions[1].prompt
    assert prompt[: len(context)] == context
    assert prompt_of(client).endswith("<|im_end|><|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
    assert again["context"][: len(prompt)] == prompt


def test_raw_prompts_are_continued_as_they_are(settings: AppSettings) -> None:
    client = says("<think>hm</think> upon a time")
    answer = whole(client, settings, "/api/generate", prompt="Once", raw=True)
    assert prompt_of(client) == "Once"
    assert answer["response"] == "<think>hm</think> upon a time"
    assert "context" not in answer
    text = refusal(post(client, settings, "/api/generate", prompt="x", raw=True, system="y"))
    assert text == "system cannot be used together with raw."


def test_a_model_without_a_template_continues_prompts(tmp_path: Path) -> None:
    client = says(" upon a time")
    plain = settings_for(write_model_folder(tmp_path, template=None))
    assert whole(client, plain, "/api/generate", prompt="Once")["response"] == " upon a time"
    assert prompt_of(client) == "Once"
    assert "no chat template" in refusal(post(client, plain, "/api/generate", prompt="Once", system="x"))


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_without_a_prompt_nothing_is_generated(settings: AppSettings, path: str, field: str) -> None:
    client = says("hello")
    answer = post(client, settings, path, keep_alive=0).json()
    assert (answer["done"], answer["done_reason"], field in answer) == (True, "unload", True)
    assert not client.submissions


# -- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", ""])
def test_a_tag_may_be_left_out(settings: AppSettings, name: str) -> None:
    answer = whole(says("x"), settings, model=name)
    assert answer["model"] == (name or "tiny"), "as the request has it"


def test_a_tag_of_the_served_name_may_be_left_out(tmp_path: Path) -> None:
    tagged = tool_settings(tmp_path, served_model_names=("org/tiny:latest", "big:8b"))
    for name in ("org/tiny", "org/tiny:latest", "big:8b"):
        assert whole(says("x"), tagged, model=name)["model"] == name
    for name in ("big", "tiny", "big:latest"):
        text = refusal(post(says("x"), tagged, "/api/chat", model=name, messages=HELLO), 404)
        assert text == f"model '{name}' not found: see /api/tags"
    listed = call(says("x"), tagged, "GET", "/api/tags").json()["models"]
    assert [model["name"] for model in listed] == ["org/tiny:latest", "big:8b"]


def test_what_is_told_of_models(settings: AppSettings) -> None:
    info = msgspec.structs.replace(ROOMY, num_parameters=7_600_000_000, weight_bytes=15, dtype="bfloat16")
    client = FakeClient(always([]), info=info)
    (listed,) = call(client, settings, "GET", "/api/tags").json()["models"]
    assert (listed["model"], listed["size"], len(listed["digest"])) == ("tiny:latest", 15, 64)
    assert listed["details"]["parameter_size"] == "7.6B"
    assert listed["details"]["quantization_level"] == "BF16"
    (running,) = call(client, settings, "GET", "/api/ps").json()["models"]
    assert (running["context_length"], running["digest"]) == (2048, listed["digest"])
    shown = post(client, settings, "/api/show").json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["fake.context_length"] == 2048
    assert "<|im_start|>" in shown["template"]
    assert shown["parameters"].splitlines()[0].split() == ["temperature", "1"]
    assert [short_count(count) for count in (999, 260_000, 1_500_000)] == ["999", "260.0K", "1.5M"]


def test_models_are_listed_while_they_are_loaded(settings: AppSettings) -> None:
    client = FakeClient(always([]), info=None)
    (listed,) = call(client, settings, "GET", "/api/tags").json()["models"]
    assert (listed["name"], listed["size"]) == ("tiny:latest", 0)
    assert post(client, settings, "/api/show").json()["capabilities"] == []


def test_clients_find_a_version_that_they_take(settings: AppSettings) -> None:
    version = call(says("x"), settings, "GET", "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4), "Codex refuses an older one"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "pull"), ("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete")],
)
def test_models_cannot_be_changed(settings: AppSettings, method: str, path: str) -> None:
    response = call(says("x"), settings, method, f"/api/{path}", json={"model": "other"})
    expected = "is not supported: the models are chosen when this server is started; it serves tiny:latest"
    assert refusal(response) == f"{path} {expected}"


def test_a_model_that_is_served_need_not_be_pulled(settings: AppSettings) -> None:
    assert post(says("x"), settings, "/api/pull", stream=True).json() == {"status": "success"}


# -- embeddings -------------------------------------------------------------------------------------


class Embedder(FakeClient):
    """Keeps its inputs."""

    def __init__(self) -> None:
        super().__init__(always([]), info=msgspec.structs.replace(ROOMY, embeddings=(EMBEDDINGS,)))
        self.inputs: list[list[int]] = []

    async def embed(self, inputs: list[list[int]], *, role: str = "main", account: Any = None) -> Any:
        self.inputs += inputs
        return np.full((len(inputs), 4), 0.5, np.float32)


def test_embeddings(settings: AppSettings) -> None:
    client = Embedder()
    answer = post(client, settings, "/api/embed", model="tiny:latest", input=["hello", "x" * 100]).json()
    assert answer["embeddings"] == [[0.5] * 4] * 2
    assert answer["prompt_eval_count"] == sum(map(len, client.inputs))
    assert len(client.inputs[1]) == 16, "cut, unless truncate is false"
    assert answer["total_duration"] >= answer["load_duration"] > 0
    text = refusal(post(client, settings, "/api/embed", input="x" * 100, truncate=False))
    assert "takes at most 16 tokens" in text
    assert post(client, settings, "/api/embed", input="").json() == {"model": "tiny", "embeddings": []}
    assert post(client, settings, "/api/embeddings", prompt="hello").json() == {"embedding": [0.5] * 4}
    assert "embedding" in post(client, settings, "/api/show").json()["capabilities"]


# -- HTTP -------------------------------------------------------------------------------------------


def test_curl_need_not_name_the_media_type_but_pages_must(settings: AppSettings) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers, status in ((form, 200), ({}, 200), ({**form, "sec-fetch-site": "none"}, 415)):
        response = call(says("x"), settings, "POST", "/api/generate", content=body, headers=headers)
        assert response.status_code == status
    other = call(says("x"), settings, "POST", "/v1/completions", content=body, headers=form)
    assert other.status_code == 415, "Ollama's paths alone"


def test_keys_are_needed_as_elsewhere(tmp_path: Path) -> None:
    locked = tool_settings(tmp_path, api_keys=("right",))
    assert refusal(call(says("x"), locked, "GET", "/api/tags"), 401).startswith("No API key was given")
    known = {"authorization": "Bearer right"}
    assert call(says("x"), locked, "GET", "/api/tags", headers=known).status_code == 200


def test_requests_are_logged_as_others_are(settings: AppSettings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tessera.request")
    post(says("hello"), settings, "/api/chat", model="tiny:latest", messages=HELLO)
    (record,) = [record for record in caplog.records if record.name == "tessera.request"]
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["endpoint"], fields["model"], fields["stream"]) == ("/api/chat", "tiny", True)
    assert fields["output_tokens"] == len(ids("hello")) + 1


def test_unknown_paths_have_ollamas_form(settings: AppSettings) -> None:
    assert refusal(call(says("x"), settings, "GET", "/api/nothing"), 404) == "There is no GET /api/nothing here."
