"""Claude Code without its screen, editing files through its tools while the model plays a script."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.clients.agents import Workplace, workplace
from tests.clients.replies import call, in_turn
from tests.clients.run import TIMEOUT
from tests.clients.scripted import MODEL, scripted

pytestmark = [pytest.mark.client("Claude Code"), pytest.mark.timeout(2 * TIMEOUT)]

# A white square of one pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return workplace("", MODEL, tmp_path)


def edits(work: Workplace) -> list[str]:
    file = str(work.folder / "hello.txt")
    return [
        f"<think>I look first.</think>I read it.\n{call('Read', file_path=file)}",
        f"<think>Now I know.</think>{call('Edit', file_path=file, old_string='world', new_string='Köln')}",
        "<think>It worked.</think>Done.",
    ]


def test_claude_code_edits_a_file_through_its_tools(work: Workplace, tmp_path: Path) -> None:
    with scripted(tmp_path / "model", in_turn(edits(work))) as (work.url, model):
        result = work.claude("Change world to Köln in hello.txt")
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "Done.")
    assert result["num_turns"] == 3
    assert (work.folder / "hello.txt").read_text() == "hello Köln\n"
    assert "hello world" in model.prompts[1]
    assert "<think>I look first.</think>I read it." in model.prompts[-1], "reasoning comes back within a turn"


def test_claude_code_goes_on_with_a_session(work: Workplace, tmp_path: Path) -> None:
    with scripted(tmp_path / "model", in_turn(edits(work) * 2)) as (work.url, model):
        first = work.claude("Change world to Köln in hello.txt")
        (work.folder / "hello.txt").write_text("hello world\n")
        second = work.claude("And once more", "--resume", first["session_id"])
    assert second["is_error"] is False
    assert (work.folder / "hello.txt").read_text() == "hello Köln\n"
    assert "Change world to Köln" in model.prompts[-1]
    assert "And once more" in model.prompts[-1]


def test_claude_code_survives_an_image_in_mid_session(work: Workplace, tmp_path: Path) -> None:
    picture = work.folder / "picture.png"
    picture.write_bytes(base64.b64decode(PNG))
    with scripted(tmp_path / "model", in_turn([call("Read", file_path=str(picture)), "I cannot see it."])) as (
        work.url,
        model,
    ):
        result = work.claude("What is in picture.png?")
    assert (result["is_error"], result["result"]) == (False, "I cannot see it.")
    assert "[An image was left out: this model reads text only.]" in model.prompts[-1]


def test_claude_code_knows_a_prompt_that_is_too_long(work: Workplace, tmp_path: Path) -> None:
    """By the words of the error."""
    big = work.folder / "big.txt"
    big.write_text("some words\n" * 1500)
    reads = [call("Read", file_path=str(big)), "Done."]
    with scripted(tmp_path / "model", in_turn(reads)) as (work.url, model):
        assert work.claude("Read big.txt")["result"] == "Done."
    whole = model.num_prompt_tokens[-1]
    with scripted(tmp_path / "small", in_turn(reads), max_model_len=whole - 1000) as (work.url, model):
        refused = work.claude("Read big.txt")
    assert (refused["is_error"], refused["terminal_reason"]) == (True, "prompt_too_long")


def test_claude_code_compacts_a_conversation(work: Workplace, tmp_path: Path) -> None:
    replies = ["Hello.", "Still here.", "<summary>They said hello twice.</summary>", "Yes."]
    with scripted(tmp_path / "model", in_turn(replies)) as (work.url, model):
        session = work.claude("marmalade")["session_id"]
        work.claude("Are you there?", "--resume", session)
        work.claude("/compact", "--resume", session)
        assert work.claude("Do you remember?", "--resume", session)["result"] == "Yes."
    assert "marmalade" in model.prompts[2]
    assert "They said hello twice." in model.prompts[3]
    assert "marmalade" not in model.prompts[3]
