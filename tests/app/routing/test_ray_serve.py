"""Ray Serve: prompts as chains of keys, the scaling's measure, and, where Ray is installed, the router itself."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tessera.app.cli.command import build_parser
from tessera.app.cli.serve_options import SERVE_OPTIONS
from tessera.app.ray_serve.errors import ReplicaDiedError, last_of_stream
from tessera.app.ray_serve.messages import CHUNK_BYTES, MAX_CHUNKS, HttpRequest, ResponseHead
from tessera.app.ray_serve.scaling import QueueAndCachePolicy
from tests.support.paths import ROOT

SYSTEM = {"role": "system", "content": "Be exact. " * 200}
QUESTION = {"role": "user", "content": "What is the sum? " * 100}
ANSWER = {"role": "assistant", "content": "It is 12. " * 100}


def request(messages: Any, authorization: str = "Bearer a", **fields: Any) -> HttpRequest:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return HttpRequest("POST", "/v1/chat/completions", (("authorization", authorization),), body)


def shared(one: HttpRequest, other: HttpRequest) -> int:
    """Keys that both begin with."""
    pairs = zip(one.prefix_keys(), other.prefix_keys(), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(one.prefix_keys()))


def test_the_next_turn_begins_with_the_keys_of_the_last() -> None:
    first = request([SYSTEM, QUESTION])
    second = request([SYSTEM, QUESTION, ANSWER, QUESTION], temperature=0.5)
    assert len(first.prefix_keys()) == (len(json.dumps([SYSTEM, QUESTION], separators=(",", ":")))) // CHUNK_BYTES
    assert shared(first, second) == len(first.prefix_keys())
    other = request([SYSTEM, {"role": "user", "content": "Another. " * 200}])
    assert 0 < shared(first, other) < len(first.prefix_keys())


def test_keys_models_and_tools_are_kept_apart() -> None:
    first = request([SYSTEM])
    assert shared(first, request([SYSTEM], authorization="Bearer b")) == 0
    assert shared(first, request([SYSTEM], model="other")) == 0
    assert shared(first, request([SYSTEM], tools=[{"type": "function"}])) == 0


def test_prompts_of_all_kinds_and_what_is_none() -> None:
    def keys(body: bytes) -> int:
        return len(HttpRequest("POST", "/v1/completions", (), body).prefix_keys())

    assert keys(json.dumps({"prompt": "a" * 2000}).encode()) == 2002 // CHUNK_BYTES
    assert keys(json.dumps({"prompt": list(range(1000))}).encode()) > 3
    assert keys(json.dumps({"input": "b" * 2000}).encode()) == 2002 // CHUNK_BYTES
    assert keys(json.dumps({"prompt": "a" * 10**6}).encode()) == MAX_CHUNKS
    assert [keys(body) for body in (b"", b"{", b"[1]", b"{}", b'{"prompt": "short"}', b'{"prompt": null}')] == [0] * 6


ENDS = {
    "/v1/chat/completions": b'data: {"error":{"message":"it ended","type":"server_error","param":null,'
    b'"code":"replica_died"}}\n\n',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"it ended"}}\n\n',
    "/api/chat": b'{"error":"it ended"}\n',
}


@pytest.mark.parametrize("path", ENDS)
def test_a_stream_whose_replica_ends_says_so_in_the_form_of_its_api(path: str) -> None:
    kind = "application/x-ndjson" if path == "/api/chat" else "text/event-stream; charset=utf-8"
    assert last_of_stream(ReplicaDiedError("it ended"), path, kind) == ENDS[path]
    assert last_of_stream(ReplicaDiedError("it ended"), path, "application/json") is None


def test_a_front_answers_for_replicas_that_do_not() -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'tessera-llm[ray]'")
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError
    from starlette.requests import Request
    from starlette.responses import Response

    from tessera.app.ray_serve.front import Front

    async def parts(*given: Any) -> AsyncIterator[Any]:
        for part in given:
            if isinstance(part, BaseException):
                raise part
            yield part

    async def ask(path: str, *given: Any) -> tuple[Response, bytes]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        front = Front(SimpleNamespace(options=lambda **_: SimpleNamespace(handle=None)))
        front._handle = SimpleNamespace(remote=lambda request: parts(*given))
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "scheme": "http"}
        response = await front(Request({**scope, "server": ("a", 80)}, receive))
        chunks = [chunk async for chunk in response.body_iterator] if hasattr(response, "body_iterator") else []
        return response, b"".join(chunks)

    head = ResponseHead(200, (("content-type", "text/event-stream"),))
    response, body = asyncio.run(ask("/v1/messages", head, b"event: ping\n\n", RayError()))
    assert body.startswith(b"event: ping\n\nevent: error\ndata: ")
    response, _ = asyncio.run(ask("/v1/messages", BackPressureError(1, 1)))
    assert (response.status_code, json.loads(bytes(response.body))["error"]["type"]) == (503, "overloaded_error")
    assert int(response.headers["retry-after"]) > 0
    response, _ = asyncio.run(ask("/v1/completions", RayError()))
    assert json.loads(bytes(response.body))["error"]["code"] == "replica_died"


@dataclass
class FakeContext:
    current_num_replicas: int
    total_num_requests: float
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None = field(default_factory=dict)


def test_the_fuller_of_queue_and_cache_decides_how_many_replicas_there_are() -> None:
    policy = QueueAndCachePolicy(under_way=10, cache_use=0.5)
    assert policy(FakeContext(2, 40))[0] == 4
    assert policy(FakeContext(2, 40, {"cache_use": {"a": 0.9, "b": 1.1}}))[0] == 4
    assert policy(FakeContext(4, 1, {"cache_use": {"a": 1.0, "b": 0.5}}))[0] == 6
    assert policy(FakeContext(4, 0, None))[0] == 0


def test_the_router_follows_the_prefix_and_forgets_a_replica_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'tessera-llm[ray]'")
    from ray.serve.request_router import RequestRouter

    from tessera.app.ray_serve.prefix_router import PrefixRouter

    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    monkeypatch.setattr(RequestRouter, "on_replica_actor_died", lambda self, replica_id: None)
    monkeypatch.setattr(PrefixRouter, "__abstractmethods__", frozenset())
    router = PrefixRouter.__new__(PrefixRouter)
    queues: dict[str, int] = {}
    router._replica_queue_len_cache = SimpleNamespace(get=queues.get)
    router.initialize_state(tokens_per_request=256.0)
    replicas = [SimpleNamespace(replica_id=name, routing_stats={}) for name in "abc"]
    router.update_replicas(replicas)

    def route(asked: HttpRequest) -> list[list[str]]:
        ranks = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[asked])))
        return [[replica.replica_id for replica in rank] for rank in ranks]

    conversation = request([SYSTEM, QUESTION])
    ((home,), others) = route(conversation)
    assert sorted([home, *others]) == ["a", "b", "c"]
    assert all(route(conversation)[0] == [home] for _ in range(5))
    queues[home] = 20
    assert route(conversation)[0] != [home], "twenty requests are worth more than this prompt"
    queues.clear()
    replicas = [replica for replica in replicas if replica.replica_id != home]
    router.update_replicas(replicas)
    assert route(conversation)[0] != [home]
    for replica in replicas:
        replica.routing_stats = {"under_way": 3, "cache_tokens": 128.0}
    router.update_replicas(replicas)
    assert len(router._index) <= 2, "an index is no larger than the caches"
    assert len(route(HttpRequest("GET", "/v1/models", (), b""))) == 2
    assert asyncio.run(router.choose_replicas([], None)) == []


def test_serves_own_schema_takes_the_configuration_and_wrong_arguments_are_refused() -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'tessera-llm[ray]'")
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from tessera.app.ray_serve.application import build

    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    build(application.args)
    build({"serve": "Qwen/Qwen3-0.6B", "max_replicas": "2"})  # text, as from a command line
    with pytest.raises(ValidationError, match="max_replica\n"):
        build({"serve": "Qwen/Qwen3-0.6B", "max_replica": 2})


def test_the_configurations_model_and_options_are_ones_that_the_server_has() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    arguments = shlex.split(config["applications"][0]["args"]["serve"])
    given = SERVE_OPTIONS.read(build_parser()[0].parse_args(["serve", *arguments]), {})
    assert (given.value("model"), given.value("log_format")) == ("Qwen/Qwen3-0.6B", "json")
