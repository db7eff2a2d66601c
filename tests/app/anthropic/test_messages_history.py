"""/v1/messages as agents use it: long histories of every kind of block, edits of the context, generous limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tessera.app.settings import AppSettings
from tests.support.fakes.fake_client import FakeClient
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import (
    PATIENCE,
    ROOMY,
    WEATHER_PARAMETERS,
    cut_after,
    prompt_of,
    says,
    tool_settings,
)

END = "<|im_end|>\n"
TOOL: Any = {"name": "weather", "description": "Tells the weather", "input_schema": WEATHER_PARAMETERS}
ASKED: Any = {"role": "user", "content": "hi"}
ANSWERED: Any = [ASKED, {"role": "assistant", "content": "hello"}]
CLEARED = "[Old tool result content cleared]"


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


def ask(client: FakeClient, settings: AppSettings, messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 9, "messages": messages, **fields}
    response = call(client, settings, "POST", "/v1/messages", params={"beta": "true"}, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def last_message(settings: AppSettings, content: Any) -> str:
    """The text that the model reads for the content of a message in mid-conversation."""
    client = says("ok")
    ask(client, settings, [*ANSWERED, {"role": "user", "content": content}])
    return prompt_of(client).split("<|im_start|>user\n")[-1].split(END)[0]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
NO_IMAGE = "[An image was left out: this model reads text only.]"
NO_DOCUMENT = "[A document was left out: this model reads text only.]"


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([{"type": "text", "text": "see"}, IMAGE], f"see\n{NO_IMAGE}"),
        ([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}], "words"),
        (
            [
                {
                    "type": "document",
                    "title": "T",
                    "context": "C",
                    "citations": {"enabled": True},
                    "source": {"type": "content", "content": [{"type": "text", "text": "words"}, IMAGE]},
                }
            ],
            f"T\nC\nwords\n{NO_IMAGE}",
        ),
        ([{"type": "document", "source": {"type": "content", "content": "words"}}], "words"),
        ([{"type": "document", "title": "T", "source": {"type": "file", "file_id": "f"}}], f"T\n{NO_DOCUMENT}"),
        (
            [{"type": "search_result", "source": "u", "title": "T", "content": [{"type": "text", "text": "found"}]}],
            "T\nu\nfound",
        ),
        ([{"type": "tool_reference", "tool_name": "weather"}], "The tool weather can be used now."),
        ([{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "x"}], "x"),
        ([{"type": "compaction", "content": "so far"}, {"type": "text", "text": "x"}], "so far\nx"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_blocks_of_every_kind_are_read_or_left_out(settings: AppSettings, blocks: Any, text: str) -> None:
    assert last_message(settings, blocks) == text


def test_results_of_tools_may_have_such_blocks_too(tmp_path: Path) -> None:
    client = says("ok")
    result = [
        {"type": "text", "text": "see"},
        IMAGE,
        {"type": "tool_reference", "tool_name": "weather"},
        {"type": "riddle"},
    ]
    history: Any = [
        ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "X"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}]},
    ]
    ask(client, tool_settings(tmp_path), history, tools=[TOOL])
    assert f"<|im_start|>tool\nsee\n{NO_IMAGE}\nThe tool weather can be used now.{END}" in prompt_of(client)


def test_what_other_services_left_in_the_history_does_not_end_a_session(tmp_path: Path) -> None:
    client = says("ok")
    assistant = [
        {"type": "redacted_thinking", "data": "xxxx"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
        {"type": "text", "text": "found"},
    ]
    history = [ASKED, {"role": "assistant", "content": assistant}, ASKED, {"role": "assistant", "content": []}, ASKED]
    ask(client, tool_settings(tmp_path), history)
    assert f"<|im_start|>assistant\nfound{END}" in prompt_of(client)


def test_a_conversation_that_begins_with_an_image_is_refused_with_one_sentence(settings: AppSettings) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [IMAGE]}]}
    response = call(says("ok"), settings, "POST", "/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "messages[0].content[0] is of the type 'image', but this model reads text only."
    )


def test_system_messages_in_mid_conversation(settings: AppSettings) -> None:
    client = says("ok")
    ask(client, settings, [*ANSWERED, ASKED, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}])
    assert prompt_of(client).endswith(
        f"<|im_start|>user\nhi{END}<|im_start|>system\nbe brief{END}<|im_start|>assistant\n"
    )


def test_system_messages_that_are_cleared_or_set_the_effort(tmp_path: Path) -> None:
    template = "{{ reasoning_effort }}|{% for m in messages %}{{ m.content }};{% endfor %}"
    client = says("ok")
    settings = settings_for(write_model_folder(tmp_path, template=template))
    cleared = {"role": "system", "content": "soon", "clear_at": "next_user_message"}
    effort = {"role": "system", "output_config": {"effort": "max"}}
    ask(client, settings, [ASKED, cleared, effort], output_config={"effort": "low"})
    assert prompt_of(client) == "max|hi;soon;"
    ask(client, settings, [ASKED, cleared, effort, *ANSWERED[1:], ASKED], output_config={"effort": "low"})
    assert prompt_of(client) == "low|hi;hello;hi;"
    for message in ({"role": "system"}, {"role": "user", "output_config": {"effort": "max"}}):
        body = {"model": "tiny", "max_tokens": 9, "messages": [ASKED, message]}
        refused = call(client, settings, "POST", "/v1/messages", json=body)
        assert "messages[1].content must have at least one block" in refused.json()["error"]["message"]


def test_max_tokens_is_clamped_to_the_context(settings: AppSettings) -> None:
    client = cut_after("on and on")
    answer = ask(client, settings, [ASKED], max_tokens=32000)
    (submission,) = client.submissions
    assert submission.params.max_tokens == ROOMY.max_model_len - len(submission.prompt)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert ask(client, settings, [ASKED], max_tokens=100)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "priority"},
        {"speed": "fast"},
        {"inference_geo": "eu"},
        {"thinking": {"type": "enabled", "budget_tokens": 31999}},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"thinking": {"type": "adaptive", "display": "updates", "block_binding": {"prefix_mismatch_behavior": "drop"}}},
        {"cache_control": {"type": "ephemeral"}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
        {"metadata": {"user_id": "u"}, "output_config": {"effort": "high", "task_budget": {"total": 1}}},
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
    ],
    ids=str,
)
def test_hints_are_taken(settings: AppSettings, fields: dict[str, Any]) -> None:
    assert ask(says("ok"), settings, [ASKED], **fields)["content"] == [{"type": "text", "text": "ok"}]


def test_the_older_name_of_the_output_format(settings: AppSettings) -> None:
    client = says("{}")
    ask(client, settings, [ASKED], output_format={"type": "json_schema", "schema": WEATHER_PARAMETERS})
    grammar = client.submissions[0].params.grammar
    assert grammar is not None
    assert '"city"' in grammar.text


def history_of_calls(number: int) -> list[Any]:
    history: list[Any] = [ASKED]
    for index in range(number):
        use = {"type": "tool_use", "id": f"t{index}", "name": "weather", "input": {"city": f"Ulm{index}"}}
        thinking = {"type": "thinking", "thinking": f"thought {index}", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": f"t{index}", "content": f"result {index} " + "rain " * 20}
        history += [{"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [result]}]
    return history


def edited(tmp_path: Path, edit: dict[str, Any], number: int = 5) -> tuple[str, list[Any], int]:
    """The prompt after an edit, the edits reported, and the tokens saved."""
    client = says("ok")
    settings = tool_settings(tmp_path)
    history = history_of_calls(number)
    body = {"model": "tiny", "messages": history, "tools": [TOOL], "context_management": {"edits": [edit]}}
    answer = ask(client, settings, history, tools=[TOOL], context_management={"edits": [edit]})
    ask(client, settings, history, tools=[TOOL])
    counted = call(client, settings, "POST", "/v1/messages/count_tokens", json=body).json()
    shortened, whole = (len(submission.prompt) for submission in client.submissions)
    assert counted == {"input_tokens": shortened, "context_management": {"original_input_tokens": whole}}
    return prompt_of(client, 0), answer["context_management"]["applied_edits"], whole - shortened


def test_old_results_of_tools_are_cleared(tmp_path: Path) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}
    prompt, applied, saved = edited(tmp_path, edit)
    assert applied == [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": saved}]
    assert prompt.count(CLEARED) == 2
    assert "result 1" not in prompt
    assert "result 2" in prompt
    assert "weather Ulm0" in prompt


@pytest.mark.parametrize(
    ("fields", "num_cleared"),
    [
        ({}, 0),  # the default trigger is 100,000 tokens
        ({"trigger": {"type": "tool_uses", "value": 5}}, 0),
        ({"trigger": {"type": "tool_uses", "value": 4}}, 2),
        ({"trigger": {"type": "input_tokens", "value": 1}, "keep": {"type": "tool_uses", "value": 1}}, 4),
        ({"trigger": {"type": "input_tokens", "value": 1}, "keep": {"type": "tool_uses", "value": 9}}, 0),
        ({"trigger": {"type": "input_tokens", "value": 1}, "exclude_tools": ["weather"]}, 0),
        (
            {
                "trigger": {"type": "input_tokens", "value": 1},
                "clear_at_least": {"type": "input_tokens", "value": 100_000},
            },
            0,
        ),
    ],
    ids=str,
)
def test_when_results_are_cleared(tmp_path: Path, fields: dict[str, Any], num_cleared: int) -> None:
    prompt, applied, saved = edited(tmp_path, {"type": "clear_tool_uses_20250919", **fields})
    assert prompt.count(CLEARED) == num_cleared
    assert [report["cleared_tool_uses"] for report in applied] == ([num_cleared] if num_cleared else [])
    assert (saved > 0) == bool(num_cleared)


def test_inputs_are_cleared_where_asked_for(tmp_path: Path) -> None:
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 1},
        "clear_tool_inputs": True,
    }
    assert "weather Ulm0" not in edited(tmp_path, edit)[0]


@pytest.mark.parametrize(
    ("keep", "num_kept"),
    [(None, 1), ({"type": "thinking_turns", "value": 2}, 2), ("all", 5), ({"type": "all"}, 5)],
)
def test_old_reasoning_is_cleared(tmp_path: Path, keep: Any, num_kept: int) -> None:
    edit = {"type": "clear_thinking_20251015", **({"keep": keep} if keep is not None else {})}
    prompt, applied, saved = edited(tmp_path, edit)
    assert prompt.count("thought") == num_kept
    assert "thought 4" in prompt
    num_cleared = 5 - num_kept
    expected = {"type": edit["type"], "cleared_thinking_turns": num_cleared, "cleared_input_tokens": saved}
    assert applied == ([expected] if num_cleared else [])


def test_edits_that_do_not_shorten_are_not_reported(tmp_path: Path) -> None:
    """This template shows no reasoning of earlier turns, so that nothing is left to clear."""
    client = says("ok")
    settings = settings_for(write_model_folder(tmp_path))
    messages = [ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}] * 2 + [ASKED]
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    assert ask(client, settings, messages, context_management=edits)["context_management"] == {"applied_edits": []}
    assert "context_management" not in ask(client, settings, messages)


def test_applied_edits_are_reported_in_streams_as_the_sdk_reads_them(tmp_path: Path) -> None:
    edit: Any = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    with (
        serve(says("ok"), tool_settings(tmp_path)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as api,
        api.beta.messages.stream(
            model="tiny",
            max_tokens=5,
            messages=history_of_calls(3),
            tools=[TOOL],
            betas=["context-management-2025-06-27"],
            context_management={"edits": [edit]},
        ) as stream,
    ):
        message = stream.get_final_message()
        assert message.context_management is not None
        (applied,) = message.context_management.applied_edits
        assert applied.type == "clear_thinking_20251015"
        assert applied.cleared_thinking_turns == 2
        assert applied.cleared_input_tokens > 0


def test_models_in_anthropics_form(settings: AppSettings) -> None:
    with (
        serve(says("ok"), settings) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as api,
    ):
        (model,) = api.models.list().data
        assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
        assert model.max_input_tokens == ROOMY.max_model_len
        assert api.models.retrieve("tiny") == model
        assert httpx.get(f"{url}/v1/models").json()["object"] == "list"


def test_names_of_tools_may_be_as_long_as_anthropics(tmp_path: Path) -> None:
    name = "mcp__" + "x" * 123
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    answer = ask(says(text), tool_settings(tmp_path), [ASKED], tools=[{**TOOL, "name": name}])
    assert [block["name"] for block in answer["content"]] == [name]
    assert len(ids(name)) > 64
