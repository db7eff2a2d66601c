"""Codex, opencode and qwen-code in a folder, editing a file through their tools while the model plays a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import Workplace, workplace
from tests.clients.replies import TOOL, USER, call, in_turn
from tests.clients.run import TIMEOUT
from tests.clients.scripted import MODEL, scripted

pytestmark = pytest.mark.timeout(2 * TIMEOUT)
QUESTION = "Replace world by Köln in hello.txt"
EDITED = "hello Köln\n"
DONE = "It says Köln now."


def texts_of(events: list[dict[str, Any]]) -> str:
    return json.dumps(events, ensure_ascii=False)


# -- Codex ------------------------------------------------------------------------------------------

CODEX_EDIT = [
    "<think>An editor would do.</think>" + call("exec_command", cmd="sed -i s/world/Köln/ hello.txt && cat hello.txt"),
    DONE,
]


@pytest.mark.client("Codex")
def test_codex_edits_a_file_through_its_tools(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", in_turn(CODEX_EDIT)) as (url, model):
        work = workplace(url, MODEL, tmp_path)
        events = work.codex(QUESTION)
    assert (work.folder / "hello.txt").read_text() == EDITED
    assert events[-1]["type"] == "turn.completed"
    assert DONE in texts_of(events)
    first, second = model.prompts
    assert '"name": "exec_command"' in first
    assert "multi_agent_v1__spawn_agent" in first, "tools of a namespace are offered"
    assert "<think>An editor would do.</think>" in second, "sealed reasoning came back"
    assert EDITED in second.rpartition(TOOL)[2]


@pytest.mark.client("Codex")
def test_codex_goes_on_with_a_session(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", in_turn([*CODEX_EDIT, "Nothing."])) as (url, model):
        work = workplace(url, MODEL, tmp_path)
        work.codex(QUESTION)
        events = work.codex("resume", "--last", "And what else?")
    assert events[-1]["type"] == "turn.completed"
    assert QUESTION in model.prompts[-1]
    assert "And what else?" in model.prompts[-1]


@pytest.mark.client("Codex")
def test_codex_knows_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", max_model_len=4096) as (url, _):
        events = workplace(url, MODEL, tmp_path).codex(QUESTION)
    assert events[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"]


@pytest.mark.client("Codex")
def test_codex_compacts_a_conversation(tmp_path: Path) -> None:
    summary = "They changed world to Köln."
    with scripted(tmp_path / "model", in_turn([*CODEX_EDIT, summary, "Yes."])) as (url, model):
        work = workplace(url, MODEL, tmp_path)
        work.codex(QUESTION)
        few = f"model_auto_compact_token_limit = {model.num_prompt_tokens[0]}"
        events = work.codex("resume", "--last", "Do you remember?", extra=few)
    assert events[-1]["type"] == "turn.completed"
    assert summary in model.prompts[-1]


# -- opencode ---------------------------------------------------------------------------------------


def opencode_reply(work: Workplace) -> Any:
    """Its title is asked for beside the work, so replies go by what the prompt has."""
    edit = call("edit", filePath=str(work.folder / "hello.txt"), oldString="world", newString="Köln")

    def reply(prompt: str) -> str:
        turn = prompt.rpartition(USER)[2]
        if "You are a title generator" in prompt:
            return "A change of place"
        if "summar" in turn:
            return "They changed world to Köln."
        if TOOL in turn or QUESTION not in turn:
            return DONE
        return f"<think>I know it.</think>{edit}"

    return reply


@pytest.mark.client("opencode")
def test_opencode_edits_a_file_through_its_tools(tmp_path: Path) -> None:
    work = workplace("", MODEL, tmp_path)
    with scripted(tmp_path / "model", opencode_reply(work)) as (work.url, model):
        events = work.opencode(QUESTION)
        again = work.opencode("--continue", "And what else?")
    assert (work.folder / "hello.txt").read_text() == EDITED
    for found in (events, again):
        assert "error" not in {event["type"] for event in found}
        assert DONE in texts_of(found)
    assert QUESTION in model.prompts[-1]
    assert "And what else?" in model.prompts[-1]


@pytest.mark.client("opencode")
def test_opencode_compacts_when_a_prompt_is_too_long(tmp_path: Path) -> None:
    """By the error of the server: its own count says that there is room."""
    work = workplace("", MODEL, tmp_path)
    with scripted(tmp_path / "model", opencode_reply(work)) as (work.url, model):
        work.opencode(QUESTION)
        work.opencode("--continue", "And " + "so on " * 500)
    whole = max(model.num_prompt_tokens)
    with scripted(tmp_path / "model", opencode_reply(work), max_model_len=whole) as (work.url, model):
        events = work.opencode("--continue", "And what else?")
    assert "They changed world to Köln." in model.prompts[-1]
    assert "so on so on" not in model.prompts[-1]
    assert DONE in texts_of(events)


# -- qwen-code --------------------------------------------------------------------------------------


@pytest.mark.client("qwen-code")
@pytest.mark.parametrize("api", ["openai", "openai-responses", "anthropic"])
def test_qwen_code_edits_a_file_through_its_tools(tmp_path: Path, api: str) -> None:
    work = workplace("", MODEL, tmp_path)
    file = str(work.folder / "hello.txt")
    replies = [
        f"<think>I look first.</think>{call('read_file', file_path=file)}",
        call("edit", file_path=file, old_string="world", new_string="Köln"),
        DONE,
    ]
    with scripted(tmp_path / "model", in_turn(replies)) as (work.url, model):
        result = work.qwen(QUESTION, api=api)
    assert (result["is_error"], result["result"]) == (False, DONE)
    assert (work.folder / "hello.txt").read_text() == EDITED
    assert "hello world" in model.prompts[1].rpartition(TOOL)[2]


@pytest.mark.client("qwen-code")
def test_qwen_code_tells_of_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", max_model_len=4096) as (url, _):
        result = workplace(url, MODEL, tmp_path).qwen(QUESTION)
    assert result["is_error"] is True
    assert "the prompt is too long" in json.dumps(result)
