"""The endpoints that users expect, on the model that comes with the project; and the metrics of its server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.servers.server_fixture import DEADLINE, Server
from tests.wire.points import COUNTERS, GAUGES, HISTOGRAMS

MODEL = "tessera-builtin"
ADD: Any = [{"role": "user", "content": "What is 2 + 3?"}]
SUM = "2 + 3 = 5"


@pytest.fixture(scope="module")
def sdk(builtin_server: Server) -> Iterator[openai.OpenAI]:
    base_url = f"{builtin_server.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=DEADLINE) as client:
        yield client


def test_wire_endpoint_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "tessera")
    assert type(model.created) is int
    assert sdk.models.retrieve(MODEL) == model


def test_wire_endpoint_chat_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=ADD, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SUM, "stop")


def test_wire_endpoint_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="2 + 3 =", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 4


def test_wire_endpoint_embeddings(sdk: openai.OpenAI) -> None:
    first, again, other = sdk.embeddings.create(model=MODEL, input=["a cat", "a cat", "12"]).data
    assert first.embedding == again.embedding != other.embedding
    assert sum(x * x for x in first.embedding) == pytest.approx(1, abs=1e-4)


def test_wire_endpoint_responses(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model=MODEL, input="What is 2 + 3?", temperature=0)
    assert (answer.output_text, answer.status) == (SUM, "completed")
    assert sdk.responses.retrieve(answer.id).output_text == SUM
    sdk.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(answer.id)


def test_wire_endpoint_messages(builtin_server: Server) -> None:
    with anthropic.Anthropic(base_url=builtin_server.url, api_key="unused", max_retries=0) as client:
        message = client.messages.create(model=MODEL, messages=ADD, max_tokens=20, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(model=MODEL, messages=ADD)
    (text,) = message.content
    assert text.type == "text"
    assert (text.text, message.stop_reason) == (SUM, "end_turn")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_wire_endpoint_ollama(builtin_server: Server) -> None:
    """One conversation is the same in Ollama's form: text, counts, and where it is counted."""
    options = {"temperature": 0, "num_predict": 20}
    body = {"model": f"{MODEL}:latest", "options": options, "stream": False}
    chat = builtin_server.post({**body, "messages": ADD}, "/api/chat")
    assert (chat["message"]["content"], chat["done_reason"]) == (SUM, "stop")
    answer = builtin_server.post({**body, "prompt": "What is 2 + 3?"}, "/api/generate")
    assert answer["response"] == SUM
    assert chat["prompt_eval_count"] == answer["prompt_eval_count"]
    assert chat["eval_count"] == answer["eval_count"] > 1
    seconds = chat["eval_duration"] / 1e9
    assert 0 < seconds < chat["total_duration"] / 1e9 < 60
    assert builtin_server.metrics()['http_requests_total{endpoint="/api/chat",status="200"}'] >= 1


def test_wire_endpoint_tokenize_and_detokenize(builtin_server: Server) -> None:
    found = builtin_server.post({"prompt": "What is 2 + 3?"}, "/tokenize")
    assert found["count"] == len(found["tokens"]) > 0
    assert builtin_server.post({"tokens": found["tokens"]}, "/detokenize") == {"prompt": "What is 2 + 3?"}
    chat = builtin_server.post({"messages": ADD}, "/tokenize")
    answer = builtin_server.post({"model": MODEL, "messages": ADD, "max_tokens": 1}, "/v1/chat/completions")
    assert chat["count"] == answer["usage"]["prompt_tokens"], "what a conversation costs can be asked beforehand"


def test_wire_endpoint_health_ready_and_version(builtin_server: Server) -> None:
    assert builtin_server.http.get("/health").json()["status"] == "ok"
    assert builtin_server.http.get("/ready").json() == {"status": "ready"}
    assert builtin_server.http.get("/version").json()["version"]


def test_wire_endpoint_metrics(builtin_server: Server) -> None:
    answer = builtin_server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\ntessera:engine_up 1.0\n" in answer.text


def test_wire_metrics_move_with_a_request(builtin_server: Server) -> None:
    """Every name that dashboards read is declared as what it is, and one request moves what it should."""
    text = builtin_server.http.get("/metrics").text
    declared = dict(re.findall(r"^# TYPE tessera:(\S+) (\S+)$", text, re.MULTILINE))
    assert {name: declared.get(name) for name in GAUGES} == dict.fromkeys(GAUGES, "gauge")
    assert {name: declared.get(f"{name}_total") for name in COUNTERS} == dict.fromkeys(COUNTERS, "counter")
    assert {name: declared.get(name) for name in HISTOGRAMS} == dict.fromkeys(HISTOGRAMS, "histogram")
    before = builtin_server.metrics()
    builtin_server.complete("2 + 3 =", 4)
    builtin_server.until_idle()
    after = builtin_server.metrics()

    def gained(name: str) -> float:
        return after[name] - before[name]

    assert gained("generation_tokens_total") == 4
    assert gained("prompt_tokens_total") > 0
    assert gained("prefix_cache_queries_total") > 0
    assert gained('request_success_total{finished_reason="length",}') == 1
    assert gained("inter_token_latency_seconds_count") == 3
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert gained(f"{name}_count") == 1
        assert gained(f"{name}_sum") > 0
