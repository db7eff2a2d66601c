"""WIRE points 9 and 17 field by field, and the HTTP rows of the fault list: what a wrong request gets."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.http.errors import error_response
from tessera.app.server.application import create_app
from tessera.app.settings import AppSettings
from tessera.app.store.errors import StoreUnavailableError
from tessera.engine.contract.logs import TextFormatter
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import as_engines, call, ids, settings_for, write_model_folder

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
PATHS: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
HELLO = play(ids("hello"), finish="length")
LEAKS = re.compile(r"Traceback|site-packages|\.py\b|0x[0-9a-f]{6}|pydantic|/tmp/")


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


def post(settings: AppSettings, path: str, body: Any, **options: Any) -> httpx.Response:
    client = FakeClient(always(HELLO))
    response = call(client, settings, "POST", path, json=body, **options)
    if response.status_code >= 400:
        assert not client.submissions, "the engine was asked before the request was checked"
    return response


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked for its four fields and for what must not be in it."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert not LEAKS.search(response.text), response.text
    return error


WRONG_IN_BOTH: list[tuple[str, Any, str]] = [
    ("model", 3, "model"),
    ("temperature", 2.5, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", "warm", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", -0.1, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("min_p", -1, "min_p"),
    ("top_n_sigma", 101, "top_n_sigma"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("presence_penalty", 3, "presence_penalty"),
    ("frequency_penalty", -3, "frequency_penalty"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", 2**31, "max_tokens"),
    ("max_tokens", 2**63, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 4096, "min_tokens"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", True, "n"),
    ("seed", 2**64, "seed"),
    ("seed", 1.5, "seed"),
    ("stop", ["a"] * 65, "stop"),
    ("stop", [""], "stop"),
    ("stop", [1], "stop"),
    ("stop", "x" * 257, "stop"),
    ("stop_token_ids", ["a"], "stop_token_ids[0]"),
    ("stop_token_ids", [1] * 129, "stop_token_ids"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias"),
    ("logit_bias", {"1": "a"}, "logit_bias"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ("priority", 2**40, "priority"),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "x" * 257, "cache_salt"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
    ("user", "x" * 1025, "user"),
    ("skip_special_tokens", 1, "skip_special_tokens"),
    # Known elsewhere, not supported here: refused and never ignored.
    ("response_format", {"type": "xml"}, "response_format"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "response_format"),
    ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs"),
    ("bad_words", [""], "bad_words"),
    ("use_beam_search", True, "use_beam_search"),
]
WRONG_IN_CHAT: list[tuple[str, Any, str]] = [
    ("messages", None, "messages"),
    ("messages", ["hi"], "messages[0]"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ("documents", [{"text": "x"}], "documents"),  # which this model's template does not show
    ("messages", [{"role": "user", "content": "x" * 5000}], "messages"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("max_completion_tokens", 129, "max_completion_tokens"),
    ("logprobs", 3, "logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("top_logprobs", 2, "top_logprobs"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("metadata", {str(i): "x" for i in range(17)}, "metadata"),
    ("continue_final_message", True, "continue_final_message"),
    ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "custom"}], "tools[0]"),
    ("tools", [{"type": "custom", "custom": {"name": "not a name"}}], "tools[0].custom.name"),
    ("tools", [{"type": "function", "function": {"name": "not a name"}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f" * 129}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 1025, "tools"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", "sometimes", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "g"}}, "tool_choice"),
    ("parallel_tool_calls", 1, "parallel_tool_calls"),
    ("function_call", {"name": "f"}, "function_call"),
    ("functions", [{"name": "not a name"}], "functions[0].name"),
    ("chat_template", "x", "chat_template"),
    ("truncation_side", "middle", "truncation_side"),
    ("modalities", ["text", "audio"], "modalities"),
    ("audio", {"voice": "x"}, "audio"),
    ("reasoning_effort", "much", "reasoning_effort"),
]
WRONG_IN_COMPLETIONS: list[tuple[str, Any, str]] = [
    ("prompt", ["a"] * 2049, "prompt"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("best_of", 2, "best_of"),
    ("suffix", "end", "suffix"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value", "param"), WRONG_IN_BOTH, ids=str)
def test_wire_9_wrong_fields_name_themselves(
    settings: AppSettings, path: str, field: str, value: Any, param: str
) -> None:
    check_refused(settings, path, field, value, param)


@pytest.mark.parametrize(("field", "value", "param"), WRONG_IN_CHAT, ids=str)
def test_wire_9_wrong_fields_of_chat(settings: AppSettings, field: str, value: Any, param: str) -> None:
    check_refused(settings, "/v1/chat/completions", field, value, param)


@pytest.mark.parametrize(("field", "value", "param"), WRONG_IN_COMPLETIONS, ids=str)
def test_wire_9_wrong_fields_of_completions(settings: AppSettings, field: str, value: Any, param: str) -> None:
    check_refused(settings, "/v1/completions", field, value, param)


def check_refused(settings: AppSettings, path: str, field: str, value: Any, param: str) -> None:
    body = {**PATHS[path], field: value}
    if field == "stream_options":
        body["stream"] = True
    response = post(settings, path, body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert error["message"].count("\n") == 0
    assert len(error["message"]) < 300


NEUTRAL: dict[str, Any] = {
    "unheard_of": {"a": 1},
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "user": "me",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "stop": ["a"] * 64,
    "guided_decoding_backend": "outlines",
    "logit_bias": None,
    "stream_options": None,
    "temperature": 1e-4,
    "top_p": 1e-4,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", NEUTRAL)
def test_wire_17_unknown_and_harmless_fields_are_accepted(settings: AppSettings, path: str, field: str) -> None:
    assert post(settings, path, {**PATHS[path], field: NEUTRAL[field]}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "metadata": {"a": "b"}},
        {"tools": [], "tool_choice": "auto"},
        {"modalities": ["text"]},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": None}, *CHAT["messages"]]},
    ],
    ids=str,
)
def test_harmless_fields_of_chat_are_accepted(settings: AppSettings, fields: dict[str, Any]) -> None:
    assert post(settings, "/v1/chat/completions", {**CHAT, **fields}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {**TEXT, "prompt": [5] * 128},
        {**TEXT, "prompt": [5] * 100, "max_tokens": 129},
        {**TEXT, "prompt": "x" * 5000},
        {**TEXT, "prompt": "x y" * 100},
    ],
)
def test_too_long_a_prompt(settings: AppSettings, body: dict[str, Any]) -> None:
    response = post(settings, "/v1/completions", body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_prompt_and_answer_may_fill_the_context_exactly(settings: AppSettings) -> None:
    assert post(settings, "/v1/completions", {**TEXT, "prompt": [5] * 100, "max_tokens": 28}).status_code == 200


def test_engine_not_ready(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    client.well = False
    starting = FakeClient(always(HELLO), info=None)
    for engine in (client, starting):
        response = call(engine, settings, "POST", "/v1/completions", json=TEXT)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert error_of(response)["code"] == "engine_unavailable"


def test_every_503_says_when_to_come_back() -> None:
    assert int(error_response(StoreUnavailableError()).headers["retry-after"]) > 0


def test_no_chat_template(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path, template=None))
    response = post(settings, "/v1/chat/completions", CHAT)
    assert response.status_code == 400
    message = error_of(response)["message"]
    assert "/v1/completions" in message
    assert "--chat-template" in message


def test_the_templates_message_is_the_errors_message(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path, template="{{ raise_exception('users first') }}"))
    response = post(settings, "/v1/chat/completions", CHAT)
    assert response.status_code == 400
    assert "users first" in error_of(response)["message"]


def test_too_many_prompts_in_preparation(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), max_text_jobs=1)
    app = create_app(as_engines(FakeClient(always(HELLO))), settings)
    workers = app.state.models.default.workers
    assert workers._places.acquire(blocking=False)
    transport = httpx.ASGITransport(app)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
            return await http.post("/v1/chat/completions", json=CHAT)

    assert asyncio.run(send()).status_code == 429
    workers._places.release()
    for _ in range(3):
        assert asyncio.run(send()).status_code == 200, "a finished job gives its place back"


def test_other_media_types_are_refused(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"content-type": media_type}
        response = call(client, settings, "POST", "/v1/completions", content=b"{}", headers=headers)
        assert response.status_code == 415
        error_of(response)


@pytest.mark.parametrize("part", [{"text": "hi"}, "hi"], ids=str)
def test_a_part_of_no_type_is_told_from_one_of_another_type(settings: AppSettings, part: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    message = error_of(post(settings, "/v1/chat/completions", {**CHAT, "messages": messages}))["message"]
    assert message == "messages[0].content has a part, number 1, that is not an object with a type, such as 'text'."


def test_a_field_with_one_value_says_which(settings: AppSettings) -> None:
    outputs = {"regex": "a", "disable_any_whitespace": True}
    message = error_of(post(settings, "/v1/completions", {**TEXT, "structured_outputs": outputs}))["message"]
    assert message == "structured_outputs.disable_any_whitespace must be false."


def test_a_compressed_body_is_refused_by_name(settings: AppSettings) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for path in ("/v1/completions", "/api/chat"):
        response = call(FakeClient(always(HELLO)), settings, "POST", path, content=b"\x1f\x8b", headers=headers)
        assert response.status_code == 415
        assert "'Content-Encoding: gzip'" in response.text
    headers["content-encoding"] = "identity"
    response = call(FakeClient(always(HELLO)), settings, "POST", path, content=b"{}", headers=headers)
    assert response.status_code != 415


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_routes_that_are_not_there(settings: AppSettings, method: str, path: str, status: int) -> None:
    response = call(FakeClient(always(HELLO)), settings, method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


def test_a_fault_of_the_server_shows_nothing_of_it(settings: AppSettings, caplog: pytest.LogCaptureFixture) -> None:
    def broken(submission: Any) -> Any:
        raise ZeroDivisionError("secret path /srv/x.py")

    caplog.handler.setFormatter(TextFormatter())
    response = call(FakeClient(broken), settings, "POST", "/v1/completions", json=TEXT)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize(
    "config",
    [{"temperature": 9.0}, {"top_p": "high"}, {"repetition_penalty": 0}],
    ids=str,
)
def test_unusable_values_of_generation_config_are_left_out(
    tmp_path: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model_folder(tmp_path, top_k=7, **config)
    client = FakeClient(always(HELLO))
    assert call(client, settings_for(folder), "POST", "/v1/completions", json=TEXT).status_code == 200
    params = client.submissions[0].params
    assert (params.temperature, params.top_p, params.repetition_penalty, params.top_k) == (1.0, 1.0, 1.0, 7)
    (name,) = config
    assert f"generation_config.json: {name} is left out: " in caplog.text
