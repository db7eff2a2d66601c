"""Agents of the command line without their screens: one question in a folder that they may change."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.catalogue import NODE_MODULES
from tests.clients.run import run

BIN = NODE_MODULES / ".bin"
CONTEXT = 2**19  # that of scripted models
CODEX_CONFIG = """
model = "{model}"
model_provider = "here"
check_for_update_on_startup = false
{extra}
[analytics]
enabled = false
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
CODEX_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")


@dataclass
class Workplace:
    """A server, the model to ask, and the folder that an agent works in; its home is beside it."""

    url: str
    model: str
    folder: Path

    @property
    def home(self) -> Path:
        return self.folder.parent / "home"

    def claude(self, question: str, *options: str) -> dict[str, Any]:
        """The result of a question to Claude Code."""
        settings = {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": self.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }
        words = ("-p", question, "--output-format", "json", "--permission-mode", "acceptEdits", *options)
        done = run([BIN / "claude", *words], self.folder, self.home, **settings)
        assert done.stdout.startswith("{"), done.stdout[-4000:] + done.stderr[-4000:]
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def codex(self, *words: str, extra: str = "") -> list[dict[str, Any]]:
        """The events of `codex exec`, the last of which ends the turn; `extra` goes into the configuration."""
        self.home.mkdir(exist_ok=True)
        (self.home / "config.toml").write_text(CODEX_CONFIG.format(url=self.url, model=self.model, extra=extra))
        command = [str(BIN / "codex"), "exec", *CODEX_OPTIONS, *words]
        return events_of(run(command, self.folder, self.home, CODEX_HOME=str(self.home)))

    def opencode(self, *words: str, compaction: bool = True) -> list[dict[str, Any]]:
        """The events of `opencode run`; without `compaction` a prompt that is too long is an error."""
        model = {"name": self.model, "tool_call": True, "reasoning": True, "limit": {"context": CONTEXT, "output": 512}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "here",
            "options": {"baseURL": f"{self.url}/v1", "apiKey": "none"},
            "models": {self.model: model},
        }
        config = {
            "autoupdate": False,
            "share": "disabled",
            "compaction": {"auto": compaction},
            "provider": {"here": provider},
            "model": f"here/{self.model}",
            "small_model": f"here/{self.model}",
            "permission": {"edit": "allow", "bash": "allow"},
        }
        (self.folder / "opencode.json").write_text(json.dumps(config))
        settings = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"}
        return events_of(run([BIN / "opencode", "run", "--format", "json", *words], self.folder, self.home, **settings))

    def qwen(self, question: str, *options: str, api: str = "openai") -> dict[str, Any]:
        """The result of a question to qwen-code."""
        settings = {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": self.model,
        }
        words = ("--auth-type", api, "--model", self.model, "--yolo", "--output-format", "json", *options, question)
        done = run([BIN / "qwen", *words], self.folder, self.home, **settings)
        assert done.stdout.startswith("["), done.stdout[-4000:] + done.stderr[-4000:]
        result: dict[str, Any] = json.loads(done.stdout)[-1]
        return result


def events_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The lines that are JSON."""
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return found


def workplace(url: str, model: str, folder: Path) -> Workplace:
    """With a file that says hello to the world."""
    work = folder / "work"
    work.mkdir()
    (work / "hello.txt").write_text("hello world\n")
    return Workplace(url, model, work)
