"""Agents with the demonstration model, whose context is shorter than their own prompts: they are told so, and end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import Workplace, workplace
from tests.clients.run import TIMEOUT
from tests.support.servers.server_fixture import Server

pytestmark = pytest.mark.timeout(2 * TIMEOUT)
QUESTION = "What is 2 + 3?"

# What each says of a prompt that is too long.
AGENTS: dict[str, tuple[Callable[[Workplace], Any], str]] = {
    "Claude Code": (lambda work: work.claude(QUESTION), "Prompt is too long"),
    "Codex": (lambda work: work.codex(QUESTION)[-1], "ran out of room in the model's context window"),
    "opencode": (lambda work: work.opencode(QUESTION, compaction=False)[-1], "ContextOverflowError"),
    "qwen-code": (lambda work: work.qwen(QUESTION), "the prompt is too long"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.client(name)) for name in AGENTS])
def test_an_agent_is_told_that_its_prompt_is_too_long(
    builtin_server: Server, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    ask, words = AGENTS[name]
    last = ask(workplace(builtin_server.url, builtin_server.model, tmp_path))
    assert words in json.dumps(last)
    record_property("note", "its own prompt is longer than the demonstration model's context of 2048 tokens")
    assert builtin_server.http.get("/health").status_code == 200
