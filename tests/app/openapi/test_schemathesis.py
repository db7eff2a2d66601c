"""schemathesis against /openapi.json: whatever is sent, no fault, and an answer of a shape that is described.

The data is drawn from a fixed seed; more examples find more: `make test-long`.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import jsonschema
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tessera.app.schema.fields import MAX_NAME
from tessera.app.server.application import create_app
from tessera.engine.contract.messages import PromptScores, TokenLogprobs
from tests.support.fakes.fake_client import FakeClient, Submission, play
from tests.support.servers.http_fixtures import as_engines, ids
from tests.support.servers.operations import HARMLESS
from tests.support.servers.server_fixture import Server
from tests.support.servers.surface_fixtures import CALL, ROOMY, tool_settings

NUM_EXAMPLES = int(os.environ.get("TESSERA_FUZZ_EXAMPLES", "3"))
SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ANSWERS = ("hello wörld", f"<think>hm</think>so {CALL}", "", f"{CALL}{CALL}", "half of <tool_call>")


def script(submission: Submission) -> Any:
    """One of several answers, with what the request wants of it."""
    token_ids = [*ids(ANSWERS[len(submission.prompt) % len(ANSWERS)]), 0][: submission.params.max_tokens]
    finish = "stop" if token_ids[-1] == 0 else "length"
    outputs = play(token_ids, finish=finish, stop_token_id=0, logprobs=submission.params.logprobs is not None)
    if submission.params.prompt_logprobs is not None:
        scores = [TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5]) for token_id in submission.prompt[1:]]
        outputs[0] = msgspec.structs.replace(outputs[0], prompt_logprobs=[PromptScores.of(scores)])
    return outputs


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    app = create_app(as_engines(FakeClient(script, info=ROOMY)), tool_settings(tmp_path_factory.mktemp("model")))

    async def without_lifespan(scope: Any, receive: Any, send: Any) -> None:
        """Schemathesis ends an app's life before it tests it."""
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    yield schemathesis.openapi.from_asgi("/openapi.json", without_lifespan)
    app.state.models.default.workers.close()


class Sent(NamedTuple):
    """A request as it was drawn."""

    method: str
    path: str
    has_body: bool
    body: Any

    @classmethod
    def of(cls, case: Case[Any]) -> Sent:
        has_body = case.operation.definition.raw.get("requestBody") is not None
        return cls(case.method, case.formatted_path, has_body, copy.deepcopy(case.body))


@pytest.fixture(scope="module")
def drawn() -> defaultdict[tuple[str, GenerationMode], list[Sent]]:
    """By operation and mode: drawing takes longer than sending, so all tests send the same."""
    return defaultdict(list)


def send(case: Case[Any], checks: list[Any]) -> None:
    """With the model's name made right, because by chance it never is."""
    body: Any = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) <= MAX_NAME:
        body["model"] = "tiny"
    response = case.call()
    if response.status_code == 413:  # a refusal as well, which the check of these does not know
        checks = [check for check in checks if check is not negative_data_rejection]
    case.validate_response(response, checks=checks)
    assert "x-request-id" in response.headers


def fits_after_all(case: Case[Any], document: Any) -> bool:
    """Whether a body that was made to break the description does not: what one form forbids, another may allow."""
    described = case.operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**described, "components": document["components"]})
    return bool(validator.is_valid(case.body))


@pytest.mark.parametrize("operation", HARMLESS, ids=lambda operation: operation.id)
def test_whatever_fits_the_description(schema: Any, drawn: Any, operation: Any) -> None:
    @SETTINGS
    @given(case=schema.find_operation_by_id(operation.id).as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Case[Any]) -> None:
        drawn[operation.id, GenerationMode.POSITIVE].append(Sent.of(case))
        send(case, CHECKS)

    check()


@pytest.mark.parametrize("operation", [one for one in HARMLESS if one.bodies or one.parameters], ids=lambda one: one.id)
def test_whatever_does_not_fit_the_description(schema: Any, drawn: Any, operation: Any) -> None:
    @SETTINGS
    @given(case=schema.find_operation_by_id(operation.id).as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Case[Any]) -> None:
        drawn[operation.id, GenerationMode.NEGATIVE].append(Sent.of(case))
        fits = operation.bodies and fits_after_all(case, schema.raw_schema)
        send(case, CHECKS if fits else [*CHECKS, negative_data_rejection])

    check()


FEW_TOKENS = 8
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def for_a_real_engine(body: Any, model: str) -> Any:
    """The same with the model's name and, so that it ends soon, few tokens; what is wrong stays wrong."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and len(body["model"]) <= MAX_NAME:
        body["model"] = model
    for name in TOKEN_LIMITS:
        if name not in body or (type(body[name]) is int and body[name] > FEW_TOKENS) or body[name] is None:
            body[name] = FEW_TOKENS
    if type(body.get("n")) is int and 2 < body["n"] <= 128:
        body["n"] = 2
    return body


def test_the_engine_answers_rightly_after_all_of_it(schema: Any, drawn: Any, builtin_server: Server) -> None:
    """Right and wrong data for every operation over HTTP: no fault, the same engine process, and a right answer."""
    sum_of_two = {"model": builtin_server.model, "messages": [{"role": "user", "content": "What is 357 + 468?"}]}
    pid = builtin_server.engine_pid()
    num_answers: Counter[int] = Counter()

    def check(sent: Sent) -> None:
        body = for_a_real_engine(sent.body, builtin_server.model)
        written = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
        content = written if sent.has_body else None
        path = quote(sent.path, safe="/%")
        headers = {"content-type": "application/json"}
        response = builtin_server.http.request(sent.method, path, content=content, headers=headers)
        num_answers[response.status_code] += 1
        assert response.status_code < 500, (sent.path, content, response.text)
        assert b"server_error" not in response.content

    for operation in HARMLESS:
        for mode in GenerationMode if operation.bodies else [GenerationMode.POSITIVE]:
            requests = drawn[operation.id, mode]
            if not requests:  # the other tests have not been run
                found = schema.find_operation_by_id(operation.id).as_strategy(generation_mode=mode)
                SETTINGS(given(case=found)(lambda case, requests=requests: requests.append(Sent.of(case))))()
            for sent in requests:
                check(sent)
    assert num_answers[200] > 10
    assert num_answers[400] > 10
    assert builtin_server.engine_pid() == pid
    answer = builtin_server.post(sum_of_two, "/v1/chat/completions")["choices"][0]["message"]["content"]
    assert answer == "357 + 468 = 825"
