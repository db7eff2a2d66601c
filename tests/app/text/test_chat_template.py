"""Chat templates: rendering equals transformers', and a template can neither run code nor run on."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tessera.app.text import render_process
from tessera.app.text.chat_template import ChatTemplate, load_chat_template
from tessera.app.text.tokenizer import Tokenizer, load_tokenizer
from tessera.engine.contract.errors import ConfigError, InvalidRequestError
from tests.support.paths import GOLDEN

GOLDENS = json.loads((GOLDEN / "chat_templates.json").read_text(encoding="utf-8"))
GOLDEN_CASES = [(model, name) for model, cases in GOLDENS["rendered"].items() for name in cases]
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"eos_token": "</s>"}).render(messages or USER, **options)


def test_goldens_cover_every_model_and_case() -> None:
    assert set(GOLDENS["rendered"]) == {"qwen3", "smollm3", "phi-3", "minimind"}
    assert len(GOLDEN_CASES) >= 36


@pytest.mark.shared
@pytest.mark.parametrize(("model", "name"), GOLDEN_CASES)
def test_equals_transformers(shared_models: Path, model: str, name: str) -> None:
    tokenizer, template = _load(shared_models / "tokenizers" / model)
    case = GOLDENS["cases"][name]
    text = template.render(
        [_alias_reasoning(message) for message in case["messages"]],
        tools=case.get("tools"),
        add_generation_prompt=case["add_generation_prompt"],
        continue_final_message=case.get("continue_final_message", False),
        extra=case.get("extra"),
    )
    expected = GOLDENS["rendered"][model][name]
    assert text == expected["text"]
    assert tokenizer.encode(text, add_special_tokens=False) == expected["token_ids"]


@cache
def _load(folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = load_tokenizer(folder)
    found = load_chat_template(folder, None, {})
    assert found is not None
    now = datetime.fromisoformat(GOLDENS["now"])
    return tokenizer, ChatTemplate(found.sources, tokenizer.special_tokens, now=lambda: now)


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, "thinking": reasoning}


def test_json_filter_escapes_nothing_for_html() -> None:
    assert render("{{ {'a': '<ü & \"'} | tojson }}") == '{"a": "<ü & \\""}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=True) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'


def test_helpers_and_whitespace_rules() -> None:
    assert render("{% if true %}\n  a\n{% endif %}\nb{{ eos_token }}") == "  a\nb</s>"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    source = "{% for i in [3, 4, 5] if i > 3 %}{{ loop.index }}{{ loop.last }}{{ i }} {% else %}none{% endfor %}"
    assert render(source) == "1False4 2True5 "
    clock = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}, now=lambda: datetime(1999, 1, 1))
    assert clock.render(USER) == "1999"


def test_generation_tag_is_transparent() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"


def test_developer_becomes_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{% if 'developer' %}{{ messages[0].role }}{% endif %}", messages) == "developer"


PLAIN = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}[system {{ messages[0].content }}]"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }} {{ m.content }}]{% endfor %}"
)
HOISTING = (
    "{% for m in messages if m.role == 'system' %}[system {{ m.content }}]{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }} {{ m.content }}]{% endfor %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }} {{ m.content }}]{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    "source", [PLAIN, ALTERNATING, HOISTING, DROPPING], ids=["plain", "alternating", "up", "dropped"]
)
def test_system_messages_in_mid_conversation_are_read_where_they_stand(source: str) -> None:
    roles = ["system", "user", "system", "user", "assistant", "user", "system", "assistant", "system"]
    messages = [{"role": role, "content": f"{index}"} for index, role in enumerate(roles)]
    shown = render(source, messages)
    if source is PLAIN:
        assert shown == "".join(f"[{role} {index}]" for index, role in enumerate(roles))
    else:
        assert shown == "[system 0][user 1\n\n2\n\n3][assistant 4][user 5\n\n6][assistant 7][user 8]"
    assert render(source, messages[:2]) == "[system 0][user 1]"


def test_tool_use_template_is_taken_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].n }}"}, {})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"n": 7}]) == "7"


def test_documents_are_a_variable_of_the_template() -> None:
    source = "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
    assert render(source, documents=[{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]) == "[a: b][c: d]"
    assert render(source) == ""


# As the templates of llava-hf/llava-1.5-7b-hf and HuggingFaceTB/SmolVLM-Instruct, which pass over a text.
IN_PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
# As that of google/gemma-3-4b-it.
IN_EITHER_FORM = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{% if part.type == 'text' %}{{ part.text }}{% endif %}]{% endfor %}"
    "{% endif %}{% endfor %}"
)


def test_a_template_of_parts_sees_the_text() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
    assert render(IN_PARTS, [*USER, called, {"role": "tool", "content": "so"}]) == "<user>hi<assistant><tool>so"
    assert render(IN_PARTS, [*USER, {"role": "assistant", "content": "so "}], continue_final_message=True) == (
        "<user>hi<assistant>so "
    )
    assert render(IN_EITHER_FORM) == "<user>hi"


def test_continue_final_message_keeps_its_trailing_space() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "so "}]
    assert render(source, messages, continue_final_message=True) == "[hi][so "


def test_continue_final_message_is_refused_where_the_template_drops_the_message() -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        render("x", [*USER, {"role": "assistant", "content": "so"}], continue_final_message=True)


def test_the_templates_own_refusal_reaches_the_user() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400
    assert caught.value.param == "messages"


def test_invalid_template_is_a_config_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate({"default": "a\n{% if %}"}, {})


def test_where_templates_are_looked_for(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert load_chat_template(tmp_path, None, {}).render(USER) == "from config"  # type: ignore[union-attr]
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path, None, {})
    assert template is not None
    assert template.sources == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("from file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = load_chat_template(tmp_path, None, {})
    assert template is not None
    assert template.sources == {"default": "from file", "tool_use": "tools"}
    override = tmp_path / "mine.txt"
    override.write_text("mine")
    assert load_chat_template(tmp_path, str(override), {}).render(USER) == "mine"  # type: ignore[union-attr]


def test_missing_override_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template .*nothing\.jinja cannot be read"):
        load_chat_template(tmp_path, str(tmp_path / "nothing.jinja"), {})


def test_a_renderer_learns_where_modules_are_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert render_process._environment() == {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": "/packages"}
    monkeypatch.delenv("PYTHONPATH")
    assert render_process._environment().keys() == {"PATH", "LANG"}
