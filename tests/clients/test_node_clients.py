"""Codex, the AI SDK and openai-node, as their users have them from npm."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.node import PACKAGES, TIMEOUT, environment, run_node
from tests.clients.scripted import call, scripted

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not PACKAGES.is_dir(), reason="make test-clients installs the packages"
)

CALLS = call("weather", city="Bonn")
OBJECT = '{"city": "Bonn"}'


def test_codex_edits_a_file_through_its_tools(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "codex"
    for folder in (work, home):
        folder.mkdir()
    (work / "a.txt").write_text("hello\n")
    replies = [
        "<think>An editor would do.</think>" + call("exec_command", cmd="sed -i s/hello/goodbye/ a.txt && cat a.txt"),
        "It says goodbye now.",
    ]
    with scripted(tmp_path / "model", replies) as (url, model):
        (home / "config.toml").write_text(f"""
model = "tiny"
model_provider = "here"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""")
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        done = subprocess.run(
            [str(PACKAGES / ".bin" / "codex"), "exec", *options, "Replace hello by goodbye in a.txt"],
            cwd=work,
            env={**environment(tmp_path), "CODEX_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (work / "a.txt").read_text() == "goodbye\n"
    assert "It says goodbye now." in done.stdout
    first, second = model.prompts
    assert '"name": "exec_command"' in first
    assert "multi_agent_v1__spawn_agent" in first, "tools of a namespace are offered"
    assert "<think>An editor would do.</think>" in second, "sealed reasoning came back"
    assert "goodbye\n" in second.rpartition("<|im_start|>tool")[2]


def test_ai_sdk_two_turns_with_tools_and_objects(tmp_path: Path) -> None:
    turns = [f"<think>hm</think>{CALLS}", "It rains.", "Sun.", OBJECT]
    with scripted(tmp_path / "model", turns * 2) as (url, model):
        chat, responses = map(json.loads, run_node("ai_sdk.mjs", url, tmp_path).splitlines())
    for answer, kind in ((chat, "chat"), (responses, "responses")):
        assert answer == {
            "kind": kind,
            "first": "It rains.",
            "steps": 2,
            "second": "Sun.",
            "object": {"city": "Bonn"},
        }
    for prompt in (model.prompts[1], model.prompts[5]):
        assert "rain in Bonn" in prompt.rpartition("<|im_start|>tool")[2]
    for prompt in (model.prompts[2], model.prompts[6]):
        assert "It rains.<|im_end|>\n<|im_start|>user\nand tomorrow?" in prompt
    assert "<think>hm</think>" in model.prompts[6], "reasoning is found again by its reference"


def test_openai_node(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", [CALLS, "It rains.", OBJECT, OBJECT, "Hi."]) as (url, model):
        answer = json.loads(run_node("openai_node.mjs", url, tmp_path))
    city = {"city": "Bonn"}
    assert answer == {"told": "It rains.", "object": city, "again": city, "final": "Hi."}
    assert len(model.prompts) == 5
