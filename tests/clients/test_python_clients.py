"""Python's clients as their users have them from PyPI, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import HERE, TIMEOUT, environment
from tests.clients.scripted import call, scripted
from tests.support.paths import ROOT

PYTHON = Path(os.environ.get("TESSERA_CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))

pytestmark = pytest.mark.skipif(not PYTHON.is_file(), reason="make test-clients installs the packages")

CALLS = call("weather", city="Bonn")
OBJECT = '{"city": "Bonn"}'


def run_python(program: str, url: str, folder: Path) -> Any:
    """What a program prints as JSON; `url` is the server's, without /v1."""
    done = subprocess.run(
        [str(PYTHON), str(HERE / "programs" / program), url],
        cwd=folder,
        env={**environment(folder), "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_litellm(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", [call("weather"), "It rains."]) as (url, _):
        answer = run_python("litellm_client.py", url, tmp_path)
    assert answer == {"called": "weather", "text": "It rains.", "errors": ["ContextWindowExceededError"] * 2}


def test_langchain(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", [CALLS, "It rains.", OBJECT] * 2) as (url, model):
        answer = run_python("langchain_client.py", url, tmp_path)
    expected = {"text": "It rains.", "city": "Bonn", "error": "ContextOverflowError"}
    assert answer == {"chat": expected, "responses": expected}
    assert "rain in Bonn" in model.prompts[1]


def test_instructor(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", [call("City", city="Bonn"), OBJECT, OBJECT]) as (url, _):
        answer = run_python("instructor_client.py", url, tmp_path)
    assert answer == {"TOOLS": "Bonn", "JSON": "Bonn", "JSON_SCHEMA": "Bonn"}


def test_openai_agents(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", [f"<think>hm</think>{CALLS}", "It rains.", "Sun."] * 2) as (url, model):
        answer = run_python("agents_client.py", url, tmp_path)
    assert answer == {key: ["It rains.", "Sun."] for key in ("OpenAIResponsesModel", "OpenAIChatCompletionsModel")}
    assert "rain in Bonn" in model.prompts[2]
    assert "<think>hm</think>" in model.prompts[2]


def test_pydantic_ai(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", [CALLS, call("final_result", city="Bonn")] * 2) as (url, model):
        answer = run_python("pydantic_ai_client.py", url, tmp_path)
    assert answer == {"OpenAIChatModel": "Bonn", "OpenAIResponsesModel": "Bonn"}
    assert "rain in Bonn" in model.prompts[1]
