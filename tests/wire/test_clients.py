"""What real clients send beyond the points of the list: hints, spellings of paths, tools of every form, limits."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.servers.http_fixtures import events, ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import CALL, PATIENCE, ROOMY, TOOL_TEMPLATE, says
from tests.wire.conftest import TEXT, Scripted, scripted
from tests.wire.requests import ASK, CHAT, TOOLS, WEATHER

PATHS: Any = {"/v1/chat/completions": CHAT, "/v1/completions": ASK, "/v1/responses": {"model": "tiny", "input": "hi"}}
EVERYWHERE = pytest.mark.parametrize("path", PATHS)
SILENT_FOR = 0.1  # seconds


@EVERYWHERE
def test_hints_are_taken(plain: Scripted, path: str) -> None:
    hints = {"store": True, "service_tier": "flex", "safety_identifier": "x", "user": "u"}
    hints |= {"kv_transfer_params": {"do_remote_decode": True}, "ec_transfer_params": {"x": 1}}
    chat = {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}
    responses = {"text": {"verbosity": "low"}, "reasoning": {"effort": "high", "summary": "detailed"}}
    more = chat if path == "/v1/chat/completions" else responses if path == "/v1/responses" else {}
    answer = plain.http.post(path, json={**PATHS[path], **hints, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] in (None, "default")


@EVERYWHERE
@pytest.mark.parametrize("model", [{}, {"model": ""}, {"model": None}], ids=str)
def test_the_served_model_is_the_default(plain: Scripted, path: str, model: Any) -> None:
    body = {name: value for name, value in PATHS[path].items() if name != "model"}
    assert plain.http.post(path, json={**body, **model}).json()["model"] == "tiny"


@EVERYWHERE
def test_top_p_0_takes_the_best_token(plain: Scripted, path: str) -> None:
    assert plain.http.post(path, json={**PATHS[path], "top_p": 0}).status_code == 200
    assert (plain.params.top_k, plain.params.top_p) == (1, 1.0)


@EVERYWHERE
def test_paths_as_clients_spell_them(plain: Scripted, path: str) -> None:
    for spelling in (f"{path}/", path.removeprefix("/v1"), f"{path.removeprefix('/v1')}/"):
        assert plain.http.post(spelling, json=PATHS[path]).status_code == 200, spelling


@pytest.mark.parametrize("path", ["/v1/models", "/models/", "/v1/models/tiny", "/health", "/", "/metrics"])
def test_head_wherever_get_works(plain: Scripted, path: str) -> None:
    head, get = plain.http.head(path), plain.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_paths_without_a_version_need_a_key_as_well(locked: Scripted) -> None:
    assert locked.http.get("/models").status_code == locked.http.get("/v1/models/").status_code == 401
    assert locked.http.get("/health/").status_code == 200


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "none False"), ("low", "low True"), ("xhigh", "xhigh True"), (None, " ")]
)
def test_reasoning_effort_reaches_the_template(tmp_path: Path, effort: str | None, shown: str) -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    with scripted(settings_for(write_model_folder(tmp_path, template=template))) as server:
        server.says(TEXT)
        chat: Any = {"reasoning_effort": effort} if effort else {}
        server.openai.chat.completions.create(**CHAT, **chat)
        assert server.prompt == f"{shown}|hi"
        reasoning: Any = {"reasoning": {"effort": effort}} if effort else {}
        answer = server.openai.responses.create(model="tiny", input="hi", **reasoning)
        assert server.prompt == f"{shown}|hi"
        assert answer.reasoning is not None
        assert answer.reasoning.effort == effort


def test_reasoning_effort_without_a_template_that_knows_it(plain: Scripted) -> None:
    plain.openai.chat.completions.create(**CHAT, reasoning_effort="high")
    assert plain.prompt.startswith("<|im_start|>user")


@EVERYWHERE
def test_a_token_limit_is_cut_to_the_context(plain: Scripted, path: str) -> None:
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    limit = ROOMY.max_model_len
    assert plain.http.post(path, json={**PATHS[path], field: limit}).status_code == 200
    assert plain.params.max_tokens == limit - len(plain.engine.submissions[-1].prompt)
    refused = plain.http.post(path, json={**PATHS[path], field: limit + 1}).json()["error"]
    assert (refused["param"], refused["code"]) == (field, "context_length_exceeded")
    pattern = rf"maximum context length is {limit} tokens.*input length and `max_tokens` exceed context limit: \d+ \+ "
    assert re.search(pattern + rf"{limit + 1} > {limit}", refused["message"])


@pytest.mark.parametrize(
    "body", [{"prompt": [5] * 2048}, {"prompt": [5] * 3000}, {"prompt": "xy " * 5000}], ids=["equal", "ids", "text"]
)
def test_a_prompt_too_long_in_the_words_that_clients_search_for(plain: Scripted, body: Any) -> None:
    error = plain.http.post("/v1/completions", json={"model": "tiny", **body}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    found = re.fullmatch(
        r"This model's maximum context length is 2048 tokens, and the prompt is too long:"
        r" (\d+) tokens > (\d+) maximum\.",
        error["message"],
    )
    assert found is not None
    assert int(found[1]) > int(found[2]) >= 2047


# Headers at once.


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Scripted]:
    """A model that takes a request and says nothing; streams show signs of life after SILENT_FOR seconds."""
    settings = settings_for(write_model_folder(tmp_path), keepalive=SILENT_FOR)
    with scripted(settings) as server:
        server.engine.hang = True
        server.plays([])
        yield server


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages"])
def test_headers_come_before_the_first_token_and_then_signs_of_life(silent: Scripted, path: str) -> None:
    body = {**PATHS.get(path, CHAT), "stream": True, **({"max_tokens": 9} if path == "/v1/messages" else {})}
    sign = b'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else b": keep-alive\n\n"
    begin = time.monotonic()
    with silent.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        received = b""
        for piece in response.iter_raw():
            received += piece
            if received.count(sign) >= 3:
                break
    assert time.monotonic() - begin > 2 * SILENT_FOR
    assert silent.engine.submissions[0].aborted.wait(PATIENCE), "the client left"


def test_signs_of_life_in_ollamas_streams_are_lines_without_text(silent: Scripted) -> None:
    """Its clients parse every line."""
    with silent.http.stream("POST", "/api/chat", json=CHAT) as response:
        lines = [json.loads(line) for line, _ in zip(response.iter_lines(), range(3), strict=False)]
    assert [(line["done"], line["message"]["content"]) for line in lines] == [(False, "")] * 3
    assert silent.engine.submissions[0].aborted.wait(PATIENCE), "the client left"


def test_no_signs_of_life_while_tokens_come(plain: Scripted) -> None:
    assert b": keep-alive" not in plain.http.post("/v1/completions", json={**ASK, "stream": True}).content


# Tools of every form.

NOTE: Any = {"type": "custom", "custom": {"name": "note", "description": "Takes notes"}}
NOTED = '<tool_call>\n{"name": "note", "arguments": {"input": "a \\"b\\"\\nc 🙂"}}\n</tool_call>'
NOTED_TEXT = 'a "b"\nc 🙂'


def test_custom_tools_of_chat(tool: Scripted) -> None:
    tool.says(f"so {NOTED}")
    answer = tool.openai.chat.completions.create(**CHAT, tools=[NOTE])
    assert "<tool>note: Takes notes</tool>" in tool.prompt
    assert answer.choices[0].message.tool_calls is not None
    (called,) = answer.choices[0].message.tool_calls
    assert called.type == "custom"
    assert (called.custom.name, called.custom.input) == ("note", NOTED_TEXT)
    assert answer.choices[0].finish_reason == "tool_calls"
    streamed = events(tool.http.post("/v1/chat/completions", json={**CHAT, "tools": [NOTE], "stream": True}).content)
    deltas = [delta for chunk in streamed for delta in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0]["type"] == "custom"
    assert deltas[0]["custom"] == {"name": "note", "input": ""}
    assert len(deltas) > 3
    assert "".join(delta["custom"]["input"] for delta in deltas) == NOTED_TEXT
    history: Any = [*CHAT["messages"], {"role": "assistant", "tool_calls": [called.model_dump()]}]
    history.append({"role": "tool", "tool_call_id": called.id, "content": "noted"})
    tool.openai.chat.completions.create(model="tiny", messages=history, tools=[NOTE])
    assert "<tool_call>note </tool_call>" in tool.prompt


def test_a_custom_tool_with_an_expression_is_enforced(tool: Scripted) -> None:
    digits = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    spec: Any = {"type": "custom", "custom": {"name": "note", "format": digits}}
    choice: Any = {"type": "custom", "custom": {"name": "note"}}
    tool.openai.chat.completions.create(**CHAT, tools=[spec], tool_choice=choice)
    assert tool.params.grammar is not None
    assert "[0-9]" in tool.params.grammar.text
    assert '"pattern"' not in tool.params.grammar.text


def test_a_custom_tools_lark_grammar_is_shown_and_enforced(tool: Scripted) -> None:
    lark: Any = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "say so"'}}
    spec: Any = {"type": "custom", "custom": {"name": "note", "format": lark}}
    tool.openai.chat.completions.create(**CHAT, tools=[spec], tool_choice="required")
    assert 'matches this grammar (lark):\nstart: "say so"' in tool.prompt
    assert tool.params.grammar is not None
    assert 'R_START: "say so"' in tool.params.grammar.text
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /y/"}
    flat: Any = {"type": "custom", "name": "note", "format": lark}
    tool.openai.responses.create(model="tiny", input="hi", tools=[flat], tool_choice="required")
    assert tool.params.grammar is not None
    assert "R_START: /y/" in tool.params.grammar.text


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(tool: Scripted, mode: str) -> None:
    other: Any = {"type": "function", "function": {**WEATHER, "name": "other"}}
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    tool.openai.chat.completions.create(**CHAT, tools=[*TOOLS, other], tool_choice=choice)
    assert "<tool>weather:" in tool.prompt
    assert "<tool>other:" not in tool.prompt
    assert (tool.params.grammar is not None) == (mode == "required")
    flat: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}]}
    tools: Any = [{"type": "function", **WEATHER}, {"type": "function", **WEATHER, "name": "other"}]
    answer = tool.openai.responses.create(model="tiny", input="hi", tools=tools, tool_choice=flat)
    assert "<tool>other:" not in tool.prompt
    assert len(answer.tools) == 2
    allowed["tools"][0]["function"]["name"] = "unknown"
    with pytest.raises(openai.BadRequestError) as refused:
        tool.openai.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice)
    assert refused.value.param == "tool_choice"


def test_functions_the_older_form_of_tools(tool: Scripted) -> None:
    tool.says(f"{CALL}\n{CALL}")
    body: Any = {**CHAT, "functions": [WEATHER], "function_call": "auto"}
    choice = tool.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert "tool_calls" not in choice["message"]
    chunks = events(tool.http.post("/v1/chat/completions", json={**body, "stream": True}).content)
    deltas = [delta["function_call"] for chunk in chunks if "function_call" in (delta := chunk["choices"][0]["delta"])]
    assert deltas[0] == {"name": "weather", "arguments": ""}
    assert "".join(delta["arguments"] for delta in deltas) == '{"city": "Köln"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    history = [*CHAT["messages"], choice["message"], {"role": "function", "name": "weather", "content": "rain"}]
    tool.http.post("/v1/chat/completions", json={**body, "messages": history, "function_call": "none"})
    assert "<tool_call>weather Köln</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in tool.prompt
    assert "<tool>" not in tool.prompt
    tool.http.post("/v1/chat/completions", json={**body, "function_call": {"name": "weather"}})
    assert tool.params.grammar is not None
    refused = tool.http.post("/v1/chat/completions", json={**body, "function_call": {"name": "other"}})
    assert refused.json()["error"]["param"] == "function_call"


# Other fields of chat.


def test_json_object_with_a_schema(plain: Scripted) -> None:
    shape: Any = {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}
    plain.openai.chat.completions.create(**CHAT, response_format=shape)
    assert plain.params.grammar is not None
    assert plain.params.grammar.kind == "json_schema"
    assert '"required":["a"]' in plain.params.grammar.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_tokens_as_token_ids(plain: Scripted, path: str) -> None:
    plain.says("ab", logprobs=True)
    asked = {"logprobs": True} if "chat" in path else {"logprobs": 1}
    body = {**PATHS[path], **asked, "return_tokens_as_token_ids": True}
    logprobs = plain.http.post(path, json=body).json()["choices"][0]["logprobs"]
    tokens = [entry["token"] for entry in logprobs["content"]] if "chat" in path else logprobs["tokens"]
    assert tokens == [f"token_id:{token_id}" for token_id in ids("ab")]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_a_message_that_is_continued(plain: Scripted, stream: bool) -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "so "}]
    body = {**CHAT, "messages": begun, "continue_final_message": True, "echo": True, "stream": stream}
    response = plain.http.post("/v1/chat/completions", json=body)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.content)]
        assert "".join(delta.get("content", "") for delta in deltas) == f"so {TEXT}"
    else:
        assert response.json()["choices"][0]["message"]["content"] == f"so {TEXT}"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_left_out(tool: Scripted, stream: bool) -> None:
    tool.says("<think>hm</think>fine")
    body = {**CHAT, "include_reasoning": False, "stream": stream}
    response = tool.http.post("/v1/chat/completions", json=body)
    assert b"reasoning" not in response.content.replace(b'"reasoning_tokens"', b"")
    assert b"fine" in response.content.replace(b'"}', b"") or stream
    assert b"hm" not in response.content


def test_a_chat_template_of_the_request(tmp_path: Path, plain: Scripted) -> None:
    own: Any = {"chat_template": "<{{ messages[0].content }}>"}
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        plain.openai.chat.completions.create(**CHAT, extra_body=own)
    with scripted(settings_for(write_model_folder(tmp_path), trust_request_chat_template=True)) as server:
        server.says(TEXT)
        server.openai.chat.completions.create(**CHAT, extra_body=own)
        assert server.prompt == "<hi>"
        for wrong in ("{% if %}", "{{ ''.__class__.__mro__ }}"):
            with pytest.raises(openai.BadRequestError, match="template"):
                server.openai.chat.completions.create(**CHAT, extra_body={"chat_template": wrong})


def test_the_side_from_which_a_prompt_is_cut(plain: Scripted) -> None:
    for side, expected in (("left", [8, 9]), ("right", [5, 6])):
        body: Any = {"prompt": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 2, "truncation_side": side}
        assert plain.http.post("/v1/completions", json={"model": "tiny", **body}).status_code == 200
        assert plain.engine.submissions[-1].prompt == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_token_offsets", True),
        ("prompt_embeds", ["x"]),
        ("vllm_xargs", {"a": 1}),
        ("padding", True),
    ],
)
def test_what_changes_the_answer_is_refused_by_name(plain: Scripted, field: str, value: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        error = plain.http.post(path, json={**PATHS[path], field: value}).json()["error"]
        assert error["param"] == field


# Structured output.


def test_keywords_that_cannot_be_enforced(plain: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "binary"}},
            "not": {"type": "integer", "not": {"const": 3}},
            "price": {"type": "string", "pattern": r"^(?!-)\d+$"},
            "kind": {"oneOf": [{"const": "a"}, {"const": "b"}]},
        },
        "propertyNames": {"pattern": "^[a-z]"},
        "enum": [{"uniqueItems": 1}],
    }

    def grammar(**strict: Any) -> str:
        shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}}
        plain.openai.chat.completions.create(**CHAT, response_format=shape)
        assert plain.params.grammar is not None
        return plain.params.grammar.text

    with caplog.at_level(logging.WARNING):
        text = grammar()
    assert text == (
        '{"type":"object","properties":{"tags":{"type":"array","items":{"type":"string"}},"not":{"type":"integer"},'
        '"price":{"type":"string"},"kind":{"anyOf":[{"const":"a"},{"const":"b"}]}},"enum":[{"uniqueItems":1}]}'
    )
    assert "uniqueItems" in grammar(strict=True), "the engine refuses it and names the keyword"


# Others that users call.


def test_endpoints_of_other_servers(plain: Scripted) -> None:
    assert plain.http.get("/ping").json()["status"] == "ok"
    assert plain.http.get("/load").json() == {"server_load": 0}
    assert plain.http.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"
    assert plain.http.post("/reset_prefix_cache").json() == {"success": True}
    assert plain.engine.num_resets == 1
    (model,) = plain.http.get("/v1/models").json()["data"]
    assert (model["root"], model["parent"], model["permission"][0]["allow_sampling"]) == ("tiny", None, True)
    assert "tessera:cache_config_info{" in plain.http.get("/metrics").text


def test_invocations(plain: Scripted) -> None:
    for body, kind in ((CHAT, "chat.completion"), (ASK, "text_completion")):
        assert plain.http.post("/invocations", json=body).json()["object"] == kind
    assert plain.http.post("/invocations", json={**CHAT, "stream": True}).content.endswith(b"[DONE]\n\n")
    assert plain.http.post("/invocations", json={}).status_code == 400


def test_the_log_says_what_was_streamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(write_model_folder(tmp_path, template=TOOL_TEMPLATE))
    with (
        caplog.at_level(logging.INFO, "tessera.request"),
        serve(says("ok"), settings) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, headers={"x-request-id": "streamed"}) as http,
    ):
        for stream in (True, False):
            http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": stream}).read()
            http.post("/v1/messages", json={**CHAT, "max_tokens": 9, "stream": stream}).read()
    logged = [getattr(record, "fields", {}) for record in caplog.records]
    ours = [fields["stream"] for fields in logged if fields.get("client_id") == "streamed"]
    assert ours == [True, True, False, False]


def test_blanks_before_text_are_not_held_for_long(tmp_path: Path) -> None:
    """White space may precede a call, and is then dropped; but a page of it is content."""
    blanks = "\n" * 100
    folder = write_model_folder(tmp_path, template=TOOL_TEMPLATE)
    with scripted(settings_for(folder, reasoning_parser="none")) as server:
        server.says(f"{blanks}so")
        body = {**CHAT, "tools": TOOLS}
        streamed = events(server.http.post("/v1/chat/completions", json={**body, "stream": True}).content)
        pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in streamed]
        assert "".join(pieces) == f"{blanks}so"
        assert len(list(filter(None, pieces))) > 30, "it flows"
        server.says(f"\n\n{CALL}")
        message = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["content"] is None
