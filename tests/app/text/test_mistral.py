"""Mistral's chats from a tekken.json alone: prompts as mistral-common makes them, calls and reasoning read back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.app.reasoning.families import choose_reasoning
from tessera.app.reasoning.magistral import BRACKETS
from tessera.app.text.chat_template import ChatTemplate, load_chat_template
from tessera.app.text.mistral import THINK_TOKENS, VERSIONS, mistral_template
from tessera.app.text.tokenizer import load_tokenizer
from tessera.app.tools.formats.mistral import MISTRAL, MISTRAL_MARKED
from tessera.app.tools.formats.registry import choose_format
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.models.tiny_tekken import SPECIAL, tekken_values, write_tekken
from tests.support.servers.http_fixtures import call, settings_for
from tests.support.servers.surface_fixtures import ROOMY

MATHS = {
    "name": "math_interpreter",
    "description": "Get the value of an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Math expression."}},
    },
}
TOOLS = [{"type": "function", "function": {**MATHS, "strict": True}}]
SHOWN_TOOLS = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "math_interpreter", '
    '"description": "Get the value of an arithmetic expression.", "parameters": {"type": "object", '
    '"properties": {"expression": {"type": "string", "description": "Math expression."}}}}}][/AVAILABLE_TOOLS]'
)
FIRST, SECOND = "123456789", "999999999"


def function_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


# The conversation of mistral-common's tests/test_tokenizer_v13.py and v15, with results in the wrong order.
CHAT = [
    system("S"),
    user("U1"),
    assistant("A1", function_call(FIRST, "F1", {}), function_call(SECOND, "F2", {})),
    result("R2", SECOND),
    result("R1", FIRST),
    assistant("A2"),
    user("U2"),
]


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[str, ChatTemplate]]:
    made = {version: template_of(version) for version in VERSIONS}
    yield made
    for template in made.values():
        template.close()


def template_of(version: str) -> ChatTemplate:
    source = mistral_template(version, set(SPECIAL.values()))
    assert source is not None
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


LISTED = (
    '[TOOL_CALLS][{"name": "F1", "arguments": {}, "id": "123456789"}, '
    '{"name": "F2", "arguments": {}, "id": "999999999"}]</s>'
)
PROMPTS = {
    "v3": f"<s>[INST]U1[/INST]A1{LISTED}"
    '[TOOL_RESULTS]{"content": "R2", "call_id": "999999999"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": "R1", "call_id": "123456789"}[/TOOL_RESULTS]'
    f"A2</s>{SHOWN_TOOLS}[INST]S\n\nU2[/INST]",
    "v7": f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U1[/INST]A1{LISTED}"
    "[TOOL_RESULTS]999999999[TOOL_CONTENT]R2[/TOOL_RESULTS][TOOL_RESULTS]123456789[TOOL_CONTENT]R1[/TOOL_RESULTS]"
    f"A2</s>{SHOWN_TOOLS}[INST]U2[/INST]",
    "v11": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U1[/INST]A1"
    "[TOOL_CALLS]F1[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]F2[CALL_ID]999999999[ARGS]{}</s>"
    "[TOOL_RESULTS]123456789[TOOL_CONTENT]R1[/TOOL_RESULTS][TOOL_RESULTS]999999999[TOOL_CONTENT]R2[/TOOL_RESULTS]"
    f"A2</s>{SHOWN_TOOLS}[INST]U2[/INST]",
    "v13": f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{SHOWN_TOOLS}[INST]U1[/INST]A1"
    "[TOOL_CALLS]F1[ARGS]{}[TOOL_CALLS]F2[ARGS]{}</s>"
    "[TOOL_RESULTS]R1[/TOOL_RESULTS][TOOL_RESULTS]R2[/TOOL_RESULTS]A2</s>[INST]U2[/INST]",
    "v15": f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{SHOWN_TOOLS}"
    '[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]U1[/INST]A1'
    "[TOOL_CALLS]F1[ARGS]{}[TOOL_CALLS]F2[ARGS]{}</s>"
    "[TOOL_RESULTS]R1[/TOOL_RESULTS][TOOL_RESULTS]R2[/TOOL_RESULTS]A2</s>[INST]U2[/INST]",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_prompts_are_mistral_commons(templates: dict[str, ChatTemplate], version: str) -> None:
    """v13 and v15 are texts of its tests; the others follow its tests of single messages."""
    assert templates[version].render(CHAT, tools=TOOLS, extra={"reasoning_effort": "high"}) == PROMPTS[version]


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_of_one_role_in_a_row_are_one(templates: dict[str, ChatTemplate], version: str) -> None:
    render = templates[version].render
    settings = '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]' if version == "v15" else ""
    chat = [user("a"), user("b"), assistant("c "), assistant("d"), user("e")]
    assert render(chat) == f"<s>{settings}[INST]a\n\nb[/INST]c\n\nd</s>[INST]e[/INST]"
    assert render([user("a"), assistant("b")], continue_final_message=True) == f"<s>{settings}[INST]a[/INST]b"
    tools_first = "" if version in ("v13", "v15") else f"[INST]e[/INST]f</s>{SHOWN_TOOLS}"
    text = render([user("e"), assistant("f"), user("a"), user("b")], tools=TOOLS)
    assert text.startswith(f"<s>{tools_first}" if tools_first else f"<s>{SHOWN_TOOLS}")
    assert text.count("[AVAILABLE_TOOLS]") == 1
    assert text.endswith("[INST]a\n\nb[/INST]")


def test_reasoning_of_earlier_turns_is_shown_where_there_are_tokens_for_it(templates: dict[str, ChatTemplate]) -> None:
    chat = [user("a"), assistant("c", thinking="b"), user("d")]
    assert templates["v13"].render(chat) == "<s>[INST]a[/INST][THINK]b[/THINK]c</s>[INST]d[/INST]"
    assert templates["v11"].render(chat) == "<s>[INST]a[/INST]c</s>[INST]d[/INST]"
    plain = mistral_template("v13", set(SPECIAL.values()) - {*THINK_TOKENS})
    assert plain is not None
    assert "[THINK]" not in plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("R1", '"R1"'),
        ('"R"', '"\\"R\\""'),
        ("", '""'),
        ("7", "7"),
        ("-0.5", "-0.5"),
        ("07", '"07"'),
        ("nan", '"nan"'),
        ("true", "true"),
        ('{"a": [1]}', '{"a": [1]}'),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_results_of_v3_are_objects(templates: dict[str, ChatTemplate], text: str, shown: str) -> None:
    chat = [user("a"), assistant("", function_call(FIRST, "f", {})), result(text, FIRST)]
    expected = f'[TOOL_RESULTS]{{"content": {shown}, "call_id": "123456789"}}[/TOOL_RESULTS]'
    assert templates["v3"].render(chat).endswith(expected)


def test_ids_of_other_lengths_are_cut(templates: dict[str, ChatTemplate]) -> None:
    chat = [user("a"), assistant("", function_call("call_0123456789", "f", "not JSON")), result("b", "call_0123456789")]
    assert templates["v11"].render(chat) == (
        '<s>[INST]a[/INST][TOOL_CALLS]f[CALL_ID]123456789[ARGS]"not JSON"</s>'
        "[TOOL_RESULTS]123456789[TOOL_CONTENT]b[/TOOL_RESULTS]"
    )
    unnamed = [user("a"), assistant("", function_call("", "f", {})), result("b", "other"), result("c", "")]
    assert (
        templates["v13"]
        .render(unnamed)
        .endswith("[TOOL_CALLS]f[ARGS]{}</s>[TOOL_RESULTS]c[/TOOL_RESULTS][TOOL_RESULTS]b[/TOOL_RESULTS]")
    )


def test_system_messages_stand_where_they_are(templates: dict[str, ChatTemplate]) -> None:
    chat = [user("a"), assistant("b"), system("c"), user("d")]
    assert templates["v13"].render(chat) == "<s>[INST]a[/INST]b</s>[SYSTEM_PROMPT]c[/SYSTEM_PROMPT][INST]d[/INST]"
    assert templates["v3"].render(chat) == "<s>[INST]a[/INST]b</s>[INST]c\n\nd[/INST]"


def test_formats_are_chosen_by_the_version() -> None:
    sources = {version: [mistral_template(version, set(SPECIAL.values())) or ""] for version in VERSIONS}
    formats = [choose_format("auto", source) for source in sources.values()]
    assert formats == [MISTRAL, MISTRAL, MISTRAL_MARKED, MISTRAL_MARKED, MISTRAL_MARKED]
    reasoning = [choose_reasoning("auto", source) for source in sources.values()]
    assert reasoning == [None, None, None, BRACKETS, BRACKETS]


# -- folders --------------------------------------------------------------------------------------


def test_a_folder_with_tekken_json_alone_has_chats(tmp_path: Path) -> None:
    """Reasoning, text and calls of a completion come apart, and a prompt has the tokens of its marks."""
    settings = settings_for(write_tekken(tmp_path, tekken_values()))
    tokenizer = load_tokenizer(tmp_path)
    text = '[THINK]hm[/THINK]On it.[TOOL_CALLS]math_interpreter[ARGS]{"expression": "1"}</s>'
    client = FakeClient(always(play(tokenizer.encode(text, add_special_tokens=False), stop_token_id=2)), info=ROOMY)
    body = {"model": "tiny", "messages": [user("a")], "tools": TOOLS}
    response = call(client, settings, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "On it.")
    assert message["tool_calls"][0]["function"] == {"name": "math_interpreter", "arguments": '{"expression": "1"}'}
    prompt = list(client.submissions[0].prompt)
    assert prompt[:2] == [1, 5]
    assert prompt[-4:] == [6, 3, 197, 4]


def test_a_system_prompt_beside_it_is_said_not_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = write_tekken(tmp_path, tekken_values())
    (folder / "SYSTEM_PROMPT.txt").write_text("You are Magistral.")
    template = load_chat_template(folder, None, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template is not None
    assert template.render([user("a")]) == "<s>[INST]a[/INST]"
    template.close()
    assert f"{folder / 'SYSTEM_PROMPT.txt'} is not applied: send it as the system message" in caplog.text


def test_a_template_of_the_folder_goes_before(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path, tekken_values())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    template = load_chat_template(folder, None, {})
    assert template is not None
    assert template.sources == {"default": "{{ messages }}"}


def test_versions_that_are_not_known_have_no_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tekken(tmp_path, tekken_values(version="v99"))
    assert load_chat_template(folder, None, {}) is None
    assert "tekken.json is of the version 'v99'; known are v3, v7, v11, v13, v15" in caplog.text
    (folder / "tekken.json").write_text("{}")
    assert load_chat_template(folder, None, {}) is None
    assert "config must be an object" in caplog.text
