"""Claude Code without its screen, editing files through its tools while the model plays a script."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import PACKAGES, TIMEOUT, environment
from tests.clients.scripted import MODEL, call, scripted

CLAUDE = PACKAGES / ".bin" / "claude"
pytestmark = pytest.mark.skipif(not CLAUDE.exists(), reason="make test-clients installs the packages")

# A white square of one pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
OPTIONS = ("--output-format", "json", "--permission-mode", "acceptEdits")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "hello.txt").write_text("hello world\n")
    return folder


def claude(url: str, workspace: Path, question: str, *options: str) -> dict[str, Any]:
    """The result of one question."""
    home = workspace.parent / "home"
    home.mkdir(exist_ok=True)
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    done = subprocess.run(
        [str(CLAUDE), "-p", question, *OPTIONS, *options],
        cwd=workspace,
        env={**environment(home), **settings},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.startswith("{"), done.stdout[-4000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def edits(workspace: Path) -> list[str]:
    file = str(workspace / "hello.txt")
    return [
        f"<think>I look first.</think>I read it.\n{call('Read', file_path=file)}",
        f"<think>Now I know.</think>{call('Edit', file_path=file, old_string='world', new_string='Köln')}",
        "<think>It worked.</think>Done.",
    ]


def test_claude_code_edits_a_file_through_its_tools(workspace: Path, tmp_path: Path) -> None:
    with scripted(tmp_path / "model", edits(workspace)) as (url, model):
        result = claude(url, workspace, "Change world to Köln in hello.txt")
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "Done.")
    assert result["num_turns"] == 3
    assert (workspace / "hello.txt").read_text() == "hello Köln\n"
    assert "hello world" in model.prompts[1]
    assert "<think>I look first.</think>I read it." in model.prompts[-1], "reasoning comes back within a turn"


def test_claude_code_goes_on_with_a_session(workspace: Path, tmp_path: Path) -> None:
    with scripted(tmp_path / "model", edits(workspace) * 2) as (url, model):
        first = claude(url, workspace, "Change world to Köln in hello.txt")
        (workspace / "hello.txt").write_text("hello world\n")
        second = claude(url, workspace, "And once more", "--resume", first["session_id"])
    assert second["is_error"] is False
    assert (workspace / "hello.txt").read_text() == "hello Köln\n"
    assert "Change world to Köln" in model.prompts[-1]
    assert "And once more" in model.prompts[-1]


def test_claude_code_survives_an_image_in_mid_session(workspace: Path, tmp_path: Path) -> None:
    picture = workspace / "picture.png"
    picture.write_bytes(base64.b64decode(PNG))
    with scripted(tmp_path / "model", [call("Read", file_path=str(picture)), "I cannot see it."]) as (url, model):
        result = claude(url, workspace, "What is in picture.png?")
    assert (result["is_error"], result["result"]) == (False, "I cannot see it.")
    assert "[An image was left out: this model reads text only.]" in model.prompts[-1]


def test_claude_code_knows_a_prompt_that_is_too_long(workspace: Path, tmp_path: Path) -> None:
    """By the words of the error."""
    big = workspace / "big.txt"
    big.write_text("some words\n" * 1500)
    reads = [call("Read", file_path=str(big)), "Done."]
    with scripted(tmp_path / "model", reads) as (url, model):
        assert claude(url, workspace, "Read big.txt")["result"] == "Done."
    whole = model.num_prompt_tokens[-1]
    with scripted(tmp_path / "small", reads, max_model_len=whole - 1000) as (url, model):
        refused = claude(url, workspace, "Read big.txt")
    assert (refused["is_error"], refused["terminal_reason"]) == (True, "prompt_too_long")


def test_claude_code_compacts_a_conversation(workspace: Path, tmp_path: Path) -> None:
    replies = ["Hello.", "Still here.", "<summary>They said hello twice.</summary>", "Yes."]
    with scripted(tmp_path / "model", replies) as (url, model):
        session = claude(url, workspace, "marmalade")["session_id"]
        claude(url, workspace, "Are you there?", "--resume", session)
        claude(url, workspace, "/compact", "--resume", session)
        assert claude(url, workspace, "Do you remember?", "--resume", session)["result"] == "Yes."
    assert "marmalade" in model.prompts[2]
    assert "They said hello twice." in model.prompts[3]
    assert "marmalade" not in model.prompts[3]
