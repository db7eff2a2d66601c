"""/v1/messages through the official Anthropic SDK: answers, streams, tools, thinking, counting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import EngineError, QueueFullError
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import (
    CALL,
    OTHER_CALL,
    PATIENCE,
    ROOMY,
    WEATHER_PARAMETERS,
    cut_after,
    prompt_of,
    says,
    tool_settings,
)

TEXT = "hello wörld 🙂"
HELLO = play([*ids(TEXT), 0], stop_token_id=0, num_cached_tokens=16)
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
TOOL: Any = {"name": "weather", "description": "Tells the weather", "input_schema": WEATHER_PARAMETERS}
END = "<|im_end|>\n"


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


@contextmanager
def sdk(client: FakeClient, settings: AppSettings, key: str = "none") -> Iterator[anthropic.Anthropic]:
    with (
        serve(client, settings) as url,
        anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE) as api,
    ):
        yield api


def test_create(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    with sdk(client, settings) as api:
        message = api.messages.create(
            **ASK,
            system="be kind",
            extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9},
            metadata={"user_id": "u"},
        )
    assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    usage = message.usage
    assert usage.cache_read_input_tokens == 16
    assert usage.input_tokens + 16 == len(client.submissions[0].prompt)
    assert usage.output_tokens == len(HELLO)
    assert message._request_id is not None
    assert message._request_id.startswith("req_")
    assert prompt_of(client) == f"<|im_start|>system\nbe kind{END}<|im_start|>user\nhi{END}<|im_start|>assistant\n"
    params = client.submissions[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (50, 0.5, 3, 0.9)


def test_stream(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api, api.messages.create(**ASK, stream=True) as stream:
        events = list(stream)
        kinds = [event.type for event in events]
        num_deltas = kinds.count("content_block_delta")
        assert num_deltas > 1
        assert kinds == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * num_deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert events[0].message.content == []
        assert events[0].message.usage.output_tokens == 0
        assert events[0].message.usage.cache_read_input_tokens == 0, "not known yet"
        assert "".join(event.delta.text for event in events[2:-3]) == TEXT
        assert events[-2].delta.stop_reason == "end_turn"
        assert events[-2].usage.output_tokens == len(HELLO)
        assert events[-2].usage.cache_read_input_tokens == 16


def test_events_on_the_wire(settings: AppSettings) -> None:
    with serve(FakeClient(always(HELLO)), settings) as url:
        response = httpx.post(f"{url}/v1/messages", json={**ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.strip().split("\n\n")
    names = [block.splitlines()[0] for block in blocks]
    assert names[:2] == ["event: message_start", "event: ping"]
    assert names[-1] == "event: message_stop"
    assert all(block.splitlines()[1].startswith("data: {") for block in blocks)


def test_stream_helper_and_async_client(settings: AppSettings) -> None:
    async def ask(url: str) -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as api:
            whole = await api.messages.create(**ASK)
            async with api.messages.stream(**ASK) as stream:
                return [whole.content[0].text, await stream.get_final_text()]

    with sdk(FakeClient(always(HELLO)), settings) as api, api.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().stop_reason == "end_turn"
    with serve(FakeClient(always(HELLO)), settings) as url:
        assert asyncio.run(ask(url)) == [TEXT, TEXT]


def test_blocks_become_a_conversation(tmp_path: Path) -> None:
    client = says("ok")
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]
    with sdk(client, tool_settings(tmp_path)) as api:
        api.messages.create(model="tiny", max_tokens=5, system=system, messages=messages, tools=[TOOL])
        counted = api.messages.count_tokens(model="tiny", system=system, messages=messages, tools=[TOOL])
    assert prompt_of(client) == (
        f"<tool>weather: Tells the weather</tool><|im_start|>system\nbe\nkind{END}<|im_start|>user\na\nb{END}"
        "<|im_start|>assistant\n<think>hm</think>let me see"
        f"<tool_call>weather Bonn</tool_call><tool_call>weather Ulm</tool_call>{END}"
        f"<|im_start|>tool\nrain{END}<|im_start|>tool\nError: no such city{END}<|im_start|>user\nso?{END}"
        "<|im_start|>assistant\n"
    )
    assert counted.input_tokens == len(client.submissions[0].prompt)


def test_a_last_message_of_the_assistants_is_gone_on_with(settings: AppSettings) -> None:
    client = says("llo")
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
    with sdk(client, settings) as api:
        api.messages.create(model="tiny", max_tokens=5, messages=messages)
    assert prompt_of(client) == f"<|im_start|>user\nhi{END}<|im_start|>assistant\nhe"


def test_tool_use(tmp_path: Path) -> None:
    with sdk(says(f"One moment.\n{CALL}\n{OTHER_CALL}"), tool_settings(tmp_path)) as api:
        message = api.messages.create(**ASK, tools=[TOOL])
        text, first, second = message.content
        assert text.text.strip() == "One moment."
        assert [(block.type, block.name, block.input) for block in (first, second)] == [
            ("tool_use", "weather", {"city": "Köln"}),
            ("tool_use", "weather", {"city": "Bonn"}),
        ]
        assert first.id != second.id
        assert message.stop_reason == "tool_use"
        with api.messages.stream(**ASK, tools=[TOOL]) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        assert len(pieces) > 2
        calls = [block.input for block in final.content if block.type == "tool_use"]
        assert calls == [{"city": "Köln"}, {"city": "Bonn"}]
        assert final.stop_reason == "tool_use"
        single = api.messages.create(
            **ASK, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert [block.type for block in single.content] == ["text", "tool_use"]


def test_tool_choice_none_hides_the_tools(tmp_path: Path) -> None:
    client = says(CALL)
    with sdk(client, tool_settings(tmp_path)) as api:
        message = api.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]
    assert "Tells the weather" not in prompt_of(client)


def test_stop_reasons(tmp_path: Path) -> None:
    settings = tool_settings(tmp_path)
    with sdk(cut_after("half"), settings) as api:
        assert api.messages.create(**ASK).stop_reason == "max_tokens"
    with sdk(says("one two three"), settings) as api:
        message = api.messages.create(**ASK, stop_sequences=["never", *(f"no{i}" for i in range(9)), " three"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
        assert message.content[0].text == "one two"
        with api.messages.stream(**ASK, stop_sequences=[" two"]) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " two")
    with sdk(cut_after(CALL[: CALL.index("Köln") + 2]), settings) as api:
        message = api.messages.create(**ASK, tools=[TOOL])
        assert message.stop_reason == "max_tokens"
        assert message.content[0].input == {}


def thinking_of(content: Sequence[Any]) -> anthropic.types.ThinkingBlock:
    """The first block, which must be reasoning."""
    assert isinstance(content[0], anthropic.types.ThinkingBlock)
    return content[0]


def error_of(error: anthropic.APIStatusError) -> dict[str, Any]:
    """The error object of a response's body."""
    assert isinstance(error.body, dict)
    found: dict[str, Any] = error.body["error"]
    return found


def test_thinking(tmp_path: Path) -> None:
    with sdk(says("<think>\nhm, so\n</think>\n\nfine"), tool_settings(tmp_path)) as api:
        message = api.messages.create(**ASK)
        thinking, text = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "hm, so")
        assert text.text == "fine"
        with api.messages.stream(**ASK) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert thinking_of(final.content).thinking == "hm, so"


@pytest.mark.parametrize("kind", ["disabled", "enabled", "adaptive"])
@pytest.mark.parametrize(
    ("template", "off", "on"),
    [
        ("{% if enable_thinking %}<think>{% endif %}ask", "ask", "<think>ask"),
        ("{% if thinking %}<think>{% endif %}ask", "ask", "<think>ask"),
        ("{# <think></think> #}ask", "ask", "ask"),
        ("ask", "ask", "ask"),
    ],
)
def test_thinking_is_switched_where_the_template_can(
    tmp_path: Path, template: str, kind: str, off: str, on: str
) -> None:
    client = says("</think>ok")
    with serve(client, settings_for(write_model_folder(tmp_path, template=template))) as url:
        response = httpx.post(f"{url}/v1/messages", json={**ASK, "thinking": {"type": kind}})
    assert response.status_code == 200
    assert prompt_of(client) == (off if kind == "disabled" else on)


def test_thinking_between_tools_follows_their_results_alone(tmp_path: Path) -> None:
    client = says("</think>ok")
    template = "{% if enable_thinking %}<think>{% endif %}ask"
    used: Any = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": "rain"}
    after = [*ASK["messages"], {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    with sdk(client, settings_for(write_model_folder(tmp_path, template=template))) as api:
        api.messages.create(**ASK, thinking={"type": "between_tools"})
        assert prompt_of(client) == "ask"
        api.messages.create(**{**ASK, "messages": after}, thinking={"type": "between_tools"})
        assert prompt_of(client) == "<think>ask"


def test_reasoning_survives_a_round_trip_through_the_sdk(tmp_path: Path) -> None:
    client = says("<think>hm, so</think>fine")
    with sdk(client, tool_settings(tmp_path)) as api:
        with api.messages.stream(**ASK) as stream:
            message = stream.get_final_message()
        assert thinking_of(message.content).signature
        assert thinking_of(message.content).signature == thinking_of(api.messages.create(**ASK).content).signature
        history: Any = [*ASK["messages"], {"role": "assistant", "content": message.content}]
        api.messages.create(**{**ASK, "messages": [*history, {"role": "user", "content": "go on"}]})
    assert "<think>hm, so</think>fine" in prompt_of(client)


@pytest.mark.parametrize("effort", ["low", "xhigh", "max"])
def test_effort_reaches_templates_that_know_it(tmp_path: Path, effort: Any) -> None:
    client = says("ok")
    folder = write_model_folder(tmp_path, template="{{ reasoning_effort }} ask")
    with sdk(client, settings_for(folder)) as api:
        api.messages.create(**ASK, output_config={"effort": effort})
        assert prompt_of(client) == f"{effort} ask"
        counted = api.messages.count_tokens(model="tiny", messages=ASK["messages"], output_config={"effort": effort})
        assert counted.input_tokens == len(client.submissions[0].prompt)


def test_keys_and_errors(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), api_keys=("right",))
    with sdk(FakeClient(always([QueueFullError("full")])), settings, key="right") as api:
        with pytest.raises(anthropic.NotFoundError):
            api.messages.create(**{**ASK, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError) as wrong:
            api.messages.create(**ASK, extra_body={"temperature": 7})
        assert error_of(wrong.value)["type"] == "invalid_request_error"
        assert (wrong.value.request_id or "").startswith("req_")
        with pytest.raises(anthropic.RateLimitError) as full:
            api.messages.create(**ASK)
        assert full.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
        with pytest.raises(anthropic.AuthenticationError) as denied:
            api.with_options(api_key="wrong").messages.create(**ASK)
        assert error_of(denied.value)["type"] == "authentication_error"


def test_a_failure_in_mid_stream(settings: AppSettings) -> None:
    outputs = [*play(ids("ab"), finish=None), EngineError("broken off")]
    with sdk(FakeClient(always(outputs)), settings) as api:
        seen: list[str] = []
        with (
            pytest.raises(anthropic.APIStatusError, match="broken off"),
            api.messages.create(**ASK, stream=True) as stream,
        ):
            seen.extend(event.type for event in stream)
        assert "content_block_delta" in seen


TEXT_BLOCK = {"type": "text", "text": "x"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": ""}
WRONG: list[tuple[str, Any, str]] = [
    ("max_tokens", None, "max_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", 2**63, "max_tokens"),
    ("messages", [], "messages"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "document"}]}], "messages[0].content[0].source"),
    ("messages", [{"role": "user", "content": [{"type": "document", "source": PDF}]}], "messages[0].content[0] is"),
    ("messages", [{"role": "user", "content": [{"type": "riddle"}]}], "messages[0].content[0] is of the type 'riddle'"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}],
        "messages",
    ),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}], "messages"),
    ("messages", [{"role": "user", "content": [TEXT_BLOCK] * 1025}], "messages[0].content"),
    ("system", 5, "system"),
    ("temperature", 3, "temperature"),
    ("top_k", 1.5, "top_k"),
    ("stop_sequences", ["a"] * 65, "stop_sequences"),
    ("stop_sequences", [""], "stop_sequences"),
    ("stop_sequences", "a", "stop_sequences"),
    ("stream", "yes", "stream"),
    ("tools", [{"type": "robot_20250124", "name": "computer"}], "tools[0]"),
    ("context_management", {"edits": [{}]}, "context_management.edits[0]"),
    ("tools", [{"name": "f"}], "tools[0].input_schema"),
    ("tools", [{"name": "no spaces", "input_schema": {}}], "tools[0].name"),
    ("tool_choice", {"type": "any"}, "tool_choice"),
    ("tool_choice", {"type": "tool"}, "tool_choice.name"),
    ("tool_choice", {"type": "maybe"}, "tool_choice.type"),
    ("thinking", {"type": "enabled", "budget_tokens": -1}, "thinking.budget_tokens"),
    ("thinking", {"type": "sometimes"}, "thinking.type"),
    ("container", "c", "container"),
    ("thread", {"type": "continue", "previous_message_id": "msg_0"}, "thread"),  # without it there is no history
    ("compaction", {"type": "enabled"}, "compaction"),
    ("mcp_servers", [{}], "mcp_servers"),
    ("output_config", {"effort": "some"}, "output_config.effort"),
]


@pytest.mark.parametrize(("field", "value", "named"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_fields_are_named(tmp_path: Path, field: str, value: Any, named: str) -> None:
    client = says("ok")
    response = call(client, tool_settings(tmp_path), "POST", "/v1/messages", json={**ASK, field: value})
    assert response.status_code == 400, response.text
    assert not client.submissions
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or a list of blocks."),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0] must have a type."),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tool_choice demands a call, but there are no tools: hosted ones do not count, as none are here.",
        ),
    ],
    ids=str,
)
def test_what_is_accepted_is_said(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    response = call(says("ok"), tool_settings(tmp_path), "POST", "/v1/messages", json={**ASK, **fields})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_bodies_and_routes_that_are_wrong_answer_in_anthropics_form(settings: AppSettings) -> None:
    with serve(FakeClient(always(HELLO), info=ROOMY), settings) as url:
        for response in (
            httpx.post(f"{url}/v1/messages", content=b"{", headers={"content-type": "application/json"}),
            httpx.get(f"{url}/v1/messages"),
            httpx.get(f"{url}/v1/messages/batches"),
        ):
            assert response.status_code in (400, 404, 405)
            assert response.json()["type"] == "error"


def test_structured_output(settings: AppSettings) -> None:
    client = says('{"city": "Ulm"}')
    form: Any = {"format": {"type": "json_schema", "schema": WEATHER_PARAMETERS}}
    with sdk(client, settings) as api:
        message = api.messages.create(**ASK, output_config=form)
    assert message.content[0].text == '{"city": "Ulm"}'
    grammar = client.submissions[0].params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("json_schema", "output_config.format")
    assert '"city"' in grammar.text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_a_tool_that_must_be_used_is_enforced(tmp_path: Path, choice: Any) -> None:
    client = says(CALL)
    with sdk(client, tool_settings(tmp_path)) as api:
        message = api.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
        assert [block.type for block in message.content] == ["tool_use"]
        assert message.stop_reason == "tool_use"
        grammar = client.submissions[0].params.grammar
        assert grammar is not None
        assert "weather" in grammar.text
        api.messages.create(**ASK, tools=[TOOL])
        assert client.submissions[1].params.grammar is None
