"""Claude Code without its screen, editing files through its tools while the model plays a script."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.npm_clients import FOLDER, ScriptedModel, in_turn, package, run, tool_call

# A white square of one pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
OPTIONS = ("--output-format", "json", "--permission-mode", "acceptEdits")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "hello.txt").write_text("hello world\n")
    return folder


def claude(model: ScriptedModel, workspace: Path, question: str, *options: str) -> dict[str, Any]:
    """The result of one question."""
    environment = {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }
    program = FOLDER / "node_modules" / ".bin" / "claude"
    result: dict[str, Any] = json.loads(run([program, "-p", question, *OPTIONS, *options], workspace, environment))
    return result


def edits(workspace: Path) -> Callable[[str], str]:
    file = str(workspace / "hello.txt")
    return in_turn(
        [
            f"<think>I look first.</think>I read it.\n{tool_call('Read', file_path=file)}",
            f"<think>Now I know.</think>{tool_call('Edit', file_path=file, old_string='world', new_string='Köln')}",
            "<think>It worked.</think>Done.",
        ]
    )


def test_a_file_is_edited_through_tools(workspace: Path, tmp_path: Path) -> None:
    package("@anthropic-ai/claude-code")
    with ScriptedModel().serve(tmp_path / "model", edits(workspace)) as model:
        result = claude(model, workspace, "Change world to Köln in hello.txt")
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "Done.")
    assert result["num_turns"] == 3
    assert (workspace / "hello.txt").read_text() == "hello Köln\n"
    assert "hello world" in model.prompts[1]
    assert "<think>I look first.</think>I read it." in model.prompts[-1], "reasoning comes back within a turn"


def test_a_session_goes_on_with_its_history(workspace: Path, tmp_path: Path) -> None:
    package("@anthropic-ai/claude-code")
    with ScriptedModel().serve(tmp_path / "model", edits(workspace)) as model:
        first = claude(model, workspace, "Change world to Köln in hello.txt")
        (workspace / "hello.txt").write_text("hello world\n")
        second = claude(model, workspace, "And once more", "--resume", first["session_id"])
    assert second["is_error"] is False
    assert (workspace / "hello.txt").read_text() == "hello Köln\n"
    assert "Change world to Köln" in model.prompts[-1]
    assert "And once more" in model.prompts[-1]


def test_an_image_in_mid_session_does_not_end_it(workspace: Path, tmp_path: Path) -> None:
    package("@anthropic-ai/claude-code")
    picture = workspace / "picture.png"
    picture.write_bytes(base64.b64decode(PNG))
    write = in_turn([tool_call("Read", file_path=str(picture)), "I cannot see it."])
    with ScriptedModel().serve(tmp_path / "model", write) as model:
        result = claude(model, workspace, "What is in picture.png?")
    assert (result["is_error"], result["result"]) == (False, "I cannot see it.")
    assert "[An image was left out: this model reads text only.]" in model.prompts[-1]
