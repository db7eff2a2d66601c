"""Numbers, lists and strings without a bound: servers checked them after the work, or never."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tessera.app.schema.request import RequestModel, parse_request
from tessera.app.server.application import create_app
from tessera.app.settings import AppSettings
from tessera.engine.contract.messages import EmbeddingInfo, ScorerInfo
from tests.faults.schema_limits import REF, Limit, SchemaLimits
from tests.support.fakes.fake_client import INFO, FakeClient, always
from tests.support.servers.http_fixtures import as_engines, call
from tests.support.servers.operations import OPERATIONS, Operation, document_for
from tests.support.servers.surface_fixtures import says, tool_settings

IN_TIME = 0.05  # seconds of processor time, from the request's last byte to the refusal
ATTEMPTS = 5  # the best of several, because other work on the machine only adds to a time
WITH_BODIES = [operation for operation in OPERATIONS if operation.bodies]
BODIES = sorted({model for operation in WITH_BODIES for model in operation.bodies}, key=lambda model: model.__name__)
EMBEDDINGS = EmbeddingInfo(
    role="main", architecture="Fake", pooling="last", dimension=8, vocab_size=512, max_input_tokens=16
)
SCORER = ScorerInfo(
    beside=False,
    form="pair",
    architecture="Fake",
    labels=("relevant",),
    scores="sigmoid",
    vocab_size=512,
    max_input_tokens=16,
)
INFO_WITH_EMBEDDINGS = msgspec.structs.replace(INFO, embeddings=(EMBEDDINGS,), scorer=SCORER)
BODY_BYTES = 64 * 2**20  # room for one character too many in every kind of text


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    return tool_settings(tmp_path_factory.mktemp("model"), max_body_bytes=BODY_BYTES)


@pytest.fixture(scope="module")
def document(settings: AppSettings) -> dict[str, Any]:
    return document_for(settings)


@pytest.fixture(scope="module")
def schemas(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"]
    return found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.id)
def test_fault_unbounded_numbers_each_has_a_described_maximum(
    document: dict[str, Any], schemas: dict[str, Any], operation: Operation
) -> None:
    limits = SchemaLimits(schemas)
    described = document["paths"][operation.path][operation.method]
    for parameter in described.get("parameters", ()):
        assert list(limits.unbounded(parameter["schema"], parameter["name"])) == []
    if operation.bodies:
        body = described["requestBody"]["content"]["application/json"]
        assert list(limits.unbounded(body["schema"], "body")) == []
        assert body["examples"]


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_fault_unbounded_numbers_at_a_maximum_are_taken(schemas: dict[str, Any], model: type[RequestModel]) -> None:
    limits = list(SchemaLimits(schemas).of({"$ref": REF + model.__name__}))
    assert limits
    for limit in limits:
        parse_request(model, json.loads(json.dumps(limit.within)))


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda operation: operation.id)
def test_fault_unbounded_numbers_beyond_a_maximum_are_refused_at_once(
    settings: AppSettings, schemas: dict[str, Any], operation: Operation
) -> None:
    """One step beyond the limit a body is refused for that field, before the engine is asked."""
    for model in operation.bodies:
        limits = list(SchemaLimits(schemas).of({"$ref": REF + model.__name__}))
        client = FakeClient(always([]), info=INFO_WITH_EMBEDDINGS)
        problems = asyncio.run(_send_all(client, settings, operation.path, limits))
        assert problems == []
        assert not client.submissions


async def _send_all(client: FakeClient, settings: AppSettings, path: str, limits: list[Limit]) -> list[str]:
    app = create_app(as_engines(client), settings)
    problems = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as http:
        for limit in limits:
            if problem := await _problem(http, path, limit):
                problems.append(f"{limit.path}: {problem}")
    app.state.models.default.workers.close()
    return problems


async def _problem(http: httpx.AsyncClient, path: str, limit: Limit) -> str | None:
    body = limit.beyond if limit.path.startswith(".model ") else {**limit.beyond, "model": "tiny"}
    content = json.dumps(body, separators=(",", ":")).encode()
    taken = math.inf
    for _ in range(ATTEMPTS):
        start = time.process_time()
        json.loads(content)
        allowed = IN_TIME + 3 * (time.process_time() - start)  # reading alone takes a busy machine its time
        start = time.process_time()
        response = await http.post(path, content=content, headers={"content-type": "application/json"})
        taken = min(taken, time.process_time() - start)
        if response.status_code != 400:
            return f"status {response.status_code}"
        if taken < allowed:
            break
    else:
        return f"refused after {taken:.3f} s"
    error = response.json()["error"]
    field = limit.path.lstrip(".").replace("[", ".").replace(" ", ".").partition(".")[0]
    # Anthropic's form has no param, Ollama's is the text alone.
    named = error if isinstance(error, str) else error.get("param") or error["message"]
    return None if named.startswith(field) else f"the error names {named[:60]}"


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/responses/"])
def test_fault_unbounded_numbers_nothing_has_a_name_beyond_the_maximum(settings: AppSettings, path: str) -> None:
    response = call(says("ok"), settings, "GET", path + "x" * 10_000)
    assert response.status_code == 404
    assert len(response.content) < 1000


def test_fault_unbounded_numbers_prompts_times_choices(tmp_path: Path) -> None:
    """Each within its own limit, the product is not."""
    client = says("ok")
    body = {"model": "tiny", "prompt": ["a"] * 1024, "n": 2}
    response = call(client, tool_settings(tmp_path), "POST", "/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert not client.submissions


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "101"}, {"limit": "9" * 5000}, {"after": "x" * 257}])
def test_fault_unbounded_numbers_of_a_query(settings: AppSettings, query: dict[str, str]) -> None:
    app = create_app(as_engines(says("ok")), settings)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as http:
            kept = (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()["id"]
            path = f"/v1/responses/{kept}/input_items"
            assert (await http.get(path, params={"limit": "100"})).status_code == 200
            return await http.get(path, params=query)

    response = asyncio.run(run())
    app.state.models.default.workers.close()
    assert response.status_code == 400
    assert response.json()["error"]["param"] in query
