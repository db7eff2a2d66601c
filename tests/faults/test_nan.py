"""NaN, infinities and tiny values: `x < 0` lets NaN through, and a division by 1e-4 may overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tessera.app.schema.request import parse_request
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import SamplingParams
from tests.faults.schema_limits import REF, SchemaLimits
from tests.support.models.tiny_models import prompt
from tests.support.servers.http_fixtures import call
from tests.support.servers.operations import OPERATIONS, Operation, document_for
from tests.support.servers.server_fixture import Server
from tests.support.servers.surface_fixtures import says

NOT_FINITE = [math.nan, math.inf, -math.inf]
FLOATS = [
    "temperature",
    "top_p",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
TINY = 1e-4


WITH_BODIES = [operation for operation in OPERATIONS if operation.bodies]


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda operation: operation.id)
def test_fault_nan_and_inf_are_refused_in_every_number(settings: AppSettings, operation: Operation) -> None:
    schemas = document_for(settings)["components"]["schemas"]
    for model in operation.bodies:
        for limit in SchemaLimits(schemas).of({"$ref": REF + model.__name__}):
            if limit.path.endswith((" maximum", " minimum")):
                parse_request(model, limit.within)
                for value in NOT_FINITE:
                    with pytest.raises(InvalidRequestError):
                        parse_request(model, replaced(limit.beyond, limit.within, value))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda operation: operation.id)
def test_fault_nan_and_inf_are_no_json(settings: AppSettings, operation: Operation, literal: str) -> None:
    content = f'{{"model": "tiny", "temperature": {literal}}}'
    headers = {"content-type": "application/json"}
    response = call(says("ok"), settings, "POST", operation.path, content=content, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "not valid JSON" in (error if isinstance(error, str) else error["message"])  # Ollama's is the text alone


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("name", [*FLOATS, "logit_bias"])
def test_fault_nan_and_inf_are_refused_by_the_engine_as_well(name: str, value: float) -> None:
    """Whatever an app process lets through."""
    given: Any = {5: value} if name == "logit_bias" else value
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(max_tokens=1, **{name: given}).verify(vocab_size=100)
    assert refused.value.param == name


@pytest.mark.parametrize("name", FLOATS)
def test_fault_nan_tiny_values_are_sound(tiny_server: Server, name: str) -> None:
    """Every log-probability is finite, and what leaves one token to choose from chooses greedily."""
    body = tiny_server.body(prompt()[:12], 12, logprobs=5, seed=3, **{"temperature": 1.0, name: TINY})
    (choice,) = tiny_server.post(body)["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 12
    assert all(-1e4 < logprob <= 0 for logprob in choice["logprobs"]["token_logprobs"])
    if name in ("temperature", "top_p"):
        assert choice["token_ids"] == tiny_server.tokens(prompt()[:12], 12)


@pytest.mark.parametrize("value", [1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("name", FLOATS)
def test_fault_nan_no_value_overflows_float32(tiny_server: Server, name: str, value: float) -> None:
    """Either the value is refused or the answer is sound: logits stay finite when they are divided by it."""
    body = tiny_server.body(prompt()[:12], 12, seed=3, **{"temperature": 1.0, name: value})
    response = tiny_server.http.post("/v1/completions", json=body)
    if name == "repetition_penalty":
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    else:
        assert response.status_code == 200
        assert response.json()["choices"][0]["finish_reason"] == "length"


def replaced(beyond: Any, within: Any, value: float) -> Any:
    """The body with `value` where its two forms differ."""
    if isinstance(beyond, dict):
        return {name: replaced(beyond[name], within[name], value) for name in beyond}
    if isinstance(beyond, list):
        return [replaced(one, other, value) for one, other in zip(beyond, within, strict=True)]
    return beyond if beyond == within else value
