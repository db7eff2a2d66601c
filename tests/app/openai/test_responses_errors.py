"""What a wrong request to /v1/responses gets: a 400 that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.http_fixtures import call, serve
from tests.support.servers.surface_fixtures import PATIENCE, says, tool_settings

ASK: dict[str, Any] = {"model": "tiny", "input": "hi"}
TOOL = {"type": "function", "name": "f"}

WRONG: list[tuple[str, Any, str]] = [
    ("input", None, "input"),
    ("input", [], "input"),
    ("input", 5, "input"),
    ("input", [5], "input[0]"),
    ("input", [{"role": "robot", "content": "x"}], "input[0].role"),
    ("input", [{"role": "user"}], "input[0].content"),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}], "input[0].content"),
    ("input", [{"type": "input_file", "file_id": "x"}], "input[0]"),
    ("input", [{"type": "item_reference", "id": "x"}], "input[0]"),
    ("input", [{"type": "function_call", "name": "f"}], "input[0].call_id"),
    ("input", [{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
    ("input", "x" * 50000, "input"),
    ("instructions", 5, "instructions"),
    ("temperature", 3, "temperature"),
    ("top_p", 2, "top_p"),
    ("top_k", -2, "top_k"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("stop", ["a"] * 65, "stop"),
    ("max_output_tokens", 0, "max_output_tokens"),
    ("max_output_tokens", 4096, "max_output_tokens"),
    ("max_output_tokens", 2**63, "max_output_tokens"),
    ("max_tool_calls", 0, "max_tool_calls"),
    ("top_logprobs", 21, "top_logprobs"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("metadata", {str(i): "x" for i in range(17)}, "metadata"),
    ("store", "yes", "store"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ("stream_options", {}, "stream_options"),
    ("previous_response_id", "resp_none", "previous_response_id"),
    ("previous_response_id", "x" * 257, "previous_response_id"),
    ("truncation", "some", "truncation"),
    ("include", ["everything"], "include[0]"),
    ("tools", [{"type": "function"}], "tools[0].name"),
    ("tools", [{"type": "function", "name": "no spaces"}], "tools[0].name"),
    ("tools", [TOOL] * 1025, "tools"),
    ("tool_choice", "sometimes", "tool_choice"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "name": "g"}, "tool_choice"),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice"),
    ("text", {"format": {"type": "grammar"}}, "text.format"),
    ("text", {"format": {"type": "json_schema", "name": "x"}}, "text.format.schema"),
    ("text", {"verbosity": "none"}, "text.verbosity"),
    ("reasoning", {"effort": "much"}, "reasoning.effort"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
    # Known elsewhere, not supported here: refused and never ignored.
    ("background", "yes", "background"),
    ("tools", [{"type": "unheard_of"}], "tools[0]"),
    ("tool_choice", {}, "tool_choice"),
    ("tool_choice", {"type": "web_search"}, "tool_choice"),
    ("input", [{"type": "reasoning", "encrypted_content": 5}], "input[0].encrypted_content"),
    ("conversation", 5, "conversation"),
    ("conversation", {"name": "x"}, "conversation"),
    ("prompt", {"id": "p"}, "prompt"),
]


@pytest.mark.parametrize(("field", "value", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_fields_name_themselves(tmp_path: Path, field: str, value: Any, param: str) -> None:
    client = says("ok")
    response = call(client, tool_settings(tmp_path), "POST", "/v1/responses", json={**ASK, field: value})
    assert response.status_code == 400, response.text
    assert not client.submissions, "the engine was asked before the request was checked"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"effort": None, "summary": "auto"}},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"service_tier": "auto", "background": False, "user": "me", "prompt_cache_key": "k"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"unheard_of": {"a": 1}},
    ],
    ids=str,
)
def test_harmless_fields_are_accepted(tmp_path: Path, fields: dict[str, Any]) -> None:
    response = call(says("ok"), tool_settings(tmp_path), "POST", "/v1/responses", json={**ASK, **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": 5}, "input must be a string or a list of items."),
        ({"input": ["hi"]}, "input[0] must be an object."),
        ({"tools": ["f"]}, "tools[0] must be an object."),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools[0] has name and parameters in `function`, as in chat completions: here they stand beside `type`.",
        ),
    ],
    ids=str,
)
def test_what_is_accepted_is_said(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    response = call(says("ok"), tool_settings(tmp_path), "POST", "/v1/responses", json={**ASK, **fields})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_an_unknown_item_is_told_the_known_types(tmp_path: Path) -> None:
    body = {**ASK, "input": [{"type": "novelty"}]}
    message = call(says("ok"), tool_settings(tmp_path), "POST", "/v1/responses", json=body).json()["error"]["message"]
    assert message.endswith("'reasoning', 'item_reference'."), "the name of those that are left out is the server's own"


def test_hosted_tools_alone_cannot_be_demanded(tmp_path: Path) -> None:
    body = {**ASK, "tools": [{"type": "web_search"}], "tool_choice": "required"}
    error = call(says("ok"), tool_settings(tmp_path), "POST", "/v1/responses", json=body).json()["error"]
    assert (error["param"], "hosted ones" in error["message"]) == ("tool_choice", True)


def test_unknown_model(tmp_path: Path) -> None:
    response = call(says("ok"), tool_settings(tmp_path), "POST", "/v1/responses", json={**ASK, "model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_stream_of_a_kept_response_is_refused(tmp_path: Path) -> None:
    with serve(says("ok"), tool_settings(tmp_path)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        response_id = http.post("/v1/responses", json={"model": "tiny", "input": "hi"}).json()["id"]
        response = http.get(f"/v1/responses/{response_id}?stream=true")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream"
