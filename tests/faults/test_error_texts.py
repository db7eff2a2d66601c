"""Error texts: addresses, paths and tracebacks that others returned to whoever asked wrongly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import (
    ContextLengthError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)
from tessera.engine.contract.messages import RequestOutput
from tessera.engine.contract.sampling_params import Grammar
from tessera.engine.grammar.compiler import GrammarCompiler
from tests.support.fakes.fake_client import FakeClient, Submission, always, play
from tests.support.grammar_harness import EOS, MODEL, VOCAB_SIZE, GrammarHarness
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import ROOMY, says, tool_settings

LEAKS = re.compile(
    r"Traceback|File \"|site-packages|\.py\b|\bat 0x|0x[0-9a-f]{6}|pydantic|starlette|orjson|msgspec|/tmp/|/srv/|"
    r"backtrace|src/|\.rs\b|thread '|panick|secret"
)
SECRET = "secret of /srv/x.py, line 3, object at 0x7f3a5c2b91d0"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
}
JSON = {"content-type": "application/json"}


def check(response: httpx.Response, *statuses: int) -> str:
    """The body of an error of the described shape, one line and nothing of the server's inside in it."""
    assert response.status_code in statuses, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    assert not LEAKS.search(response.text), response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 1000
    if response.request.url.path.startswith("/v1/messages"):
        assert response.json()["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    return response.text


# ---- every status -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_fault_error_texts_of_every_status(tmp_path: Path, path: str) -> None:
    open_server = tool_settings(tmp_path)
    keyed = tool_settings(tmp_path, api_keys=("secret",))
    narrow = tool_settings(tmp_path, max_body_bytes=100)

    def send(settings: AppSettings, client: FakeClient | None = None, method: str = "POST", **options: Any) -> Any:
        given = {"json": {"model": "tiny", **BODIES[path]}, **options} if "content" not in options else options
        return call(client or says("ok"), settings, method, path, **given)

    check(send(keyed), 401)
    check(send(keyed, headers={"authorization": "Bearer \xff\x00".encode("latin-1")}), 401)
    check(send(open_server, json={**BODIES[path], "model": SECRET.replace("secret", "guess")[:6]}), 404)
    check(send(open_server, method="PUT"), 405)
    check(send(narrow, content=b" " * 200, headers=JSON), 413)
    check(send(open_server, content=b"{}", headers={"content-type": "text/html"}), 415)
    for content in (b"", b"{", b"[]", b"\xff", b"\x00", b'"x"', b'{"a":' * 70 + b"1" + b"}" * 70, b"[" * 100_000):
        check(send(open_server, content=content, headers=JSON), 400)
    failures: list[Exception] = [
        QueueFullError("full", retry_after=3),
        EngineUnavailableError("the engine is starting"),
        EngineError("the logits of this request are not finite"),
        ContextLengthError("too long", param="prompt"),
    ]
    for failure in failures:
        assert isinstance(failure, RequestError)
        check(send(open_server, FakeClient(always([failure]), info=ROOMY)), failure.status)
    check(send(open_server, FakeClient(always([]), info=None)), 503)


@pytest.mark.parametrize("field_value", [None, True, 1, 1.5, "x", [], {}, [None], {"a": {}}, "\u0000", "x" * 70_000])
@pytest.mark.parametrize("path", BODIES)
def test_fault_error_texts_of_wrong_types_in_every_field(tmp_path: Path, path: str, field_value: Any) -> None:
    settings = tool_settings(tmp_path)
    for name in ("model", "messages", "prompt", "input", "tools", "tool_choice", "response_format", "stop", "text"):
        body = {"model": "tiny", **BODIES[path], name: field_value}
        response = call(says("ok"), settings, "POST", path, json=body)
        if response.status_code != 200:
            check(response, 400, 404)


# ---- faults of the server -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_fault_error_texts_of_the_servers_own_faults(
    tmp_path: Path, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first token and after it; what happened is in the log alone."""

    def at_once(submission: Submission) -> Iterator[RequestOutput]:
        raise ZeroDivisionError(SECRET)

    def later(submission: Submission) -> Iterator[RequestOutput]:
        yield from play(ids("ab"), finish=None)
        raise ZeroDivisionError(SECRET)

    body = {"model": "tiny", **BODIES[path], "stream": stream}
    response = call(FakeClient(at_once, info=ROOMY), tool_settings(tmp_path), "POST", path, json=body)
    check(response, 500)
    assert SECRET in caplog.text
    response = call(FakeClient(later, info=ROOMY), tool_settings(tmp_path), "POST", path, json=body)
    assert not LEAKS.search(response.text), response.text
    if stream:
        assert response.status_code == 200
        assert "log names the cause" in response.text
    else:
        check(response, 500)


# ---- templates and grammars ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception(raise_exception | string) }}",
        "{{ raise_exception(messages.append | string) }}",
        "{{ raise_exception(namespace(a=1) | string) }}",
        "{{ raise_exception(cycler | string) }}",
        "{{ messages.nothing.more }}",
        "{{ messages[9].role }}",
        "{{ 1 / 0 }}",
        "{{ strftime_now(5) }}",
        "{{ messages | tojson(indent='x', nonsense=1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) }}",
        "{{ raise_exception(self | string) }}",
    ],
)
def test_fault_error_texts_of_chat_templates(tmp_path: Path, template: str) -> None:
    settings = settings_for(write_model_folder(tmp_path, template=template))
    check(call(says("ok"), settings, "POST", "/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES}), 400)


def test_fault_error_texts_of_grammars() -> None:
    """The compiler's own complaints, which come with its source and its state."""
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    engine = GrammarHarness(compiler)
    texts = [
        "",
        "{",
        "(",
        "[",
        "a{999999}",
        "start: /(/",
        "start: <x>",
        'start: "',
        "root ::= ",
        "root ::= (",
        "\\",
        "\0",
    ]
    wrong = [Grammar(kind, text) for kind in ("json_schema", "regex", "lark", "gbnf") for text in texts]
    definitions: list[dict[str, Any]] = [{"type": "x"}, {"$ref": "#/a"}, {"not": {}}]
    wrong += [Grammar("json_schema", json.dumps(definition)) for definition in definitions]
    num_refused = 0
    for grammar in wrong:
        answer = engine.answer(grammar, max_tokens=4)
        if answer.finish_reason == "error":
            num_refused += 1
            assert answer.error_status == 400
            assert answer.error is not None
            assert not LEAKS.search(answer.error), answer.error
            assert "\n" not in answer.error
    compiler.close()
    assert num_refused > 20


def test_fault_error_texts_quote_no_more_than_a_little_of_a_request(tmp_path: Path) -> None:
    settings = tool_settings(tmp_path)
    huge = "x" * 60_000
    bodies: list[dict[str, Any]] = [
        {"model": huge[:256], "prompt": "x"},
        {"model": "tiny", "prompt": "x", "logit_bias": {huge: 1}},
        {"model": "tiny", "prompt": "x", "structured_outputs": {huge: 1}},
        {"model": "tiny", "prompt": "x", "response_format": {"type": huge}},
    ]
    for body in bodies:
        assert len(check(call(says("ok"), settings, "POST", "/v1/completions", json=body), 400, 404)) < 1200
    assert len(check(call(says("ok"), settings, "GET", "/" + huge), 404)) < 1200


def test_fault_error_texts_of_the_engines_refusals_are_passed_on_whole(tmp_path: Path) -> None:
    """So that leaving something out is not how the others pass."""
    client = FakeClient(always([InvalidRequestError("top_k must be 7", param="top_k")]), info=ROOMY)
    response = call(client, tool_settings(tmp_path), "POST", "/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert "top_k must be 7" in check(response, 400)
