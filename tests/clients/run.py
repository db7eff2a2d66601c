"""Programs that use a client, in the environment that has its package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.catalogue import CLIENTS, HERE, NODE_MODULES

TIMEOUT = 600  # seconds; most take a few, where nothing else runs
PROGRAMS = HERE / "programs"


def environment(home: Path) -> dict[str, str]:
    """For a client that may talk to the loopback alone: its telemetry is off, and other requests go to no proxy."""
    return {
        "PATH": f"{NODE_MODULES / '.bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "DO_NOT_TRACK": "1",
        "DISABLE_TELEMETRY": "1",
        "OPENAI_API_KEY": "none",
        "AI_SDK_LOG_WARNINGS": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run(command: Sequence[str | Path], folder: Path, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command to its end, in a folder."""
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**environment(home), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )


def run_checks(name: str, url: str, folder: Path) -> Mapping[str, Any]:
    """What a client's program prints, by the names of its checks; `url` is the server's, without /v1."""
    client = CLIENTS[name]
    program = PROGRAMS / PROGRAM_FILES[name]
    node = shutil.which("node")
    interpreter = node if client.environment is None else client.python
    assert interpreter is not None
    done = run([interpreter, program, url, folder / "model"], folder, folder / "home")
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {"": (done.stdout + done.stderr)[-3000:]}
    found: Mapping[str, Any] = json.loads(lines[-1])
    return found


PROGRAM_FILES = {
    "openai-python": "openai_python.py",
    "openai-node": "openai_node.mjs",
    "anthropic-python": "anthropic_python.py",
    "@anthropic-ai/sdk": "anthropic_node.mjs",
    "AI SDK": "ai_sdk.mjs",
    "LangChain": "langchain_client.py",
    "LlamaIndex": "llama_index_client.py",
    "litellm": "litellm_client.py",
    "instructor": "instructor_client.py",
    "pydantic-ai": "pydantic_ai_client.py",
    "openai-agents": "agents_client.py",
    "DSPy": "dspy_client.py",
    "guidellm": "guidellm_client.py",
    "ollama-python": "ollama_python.py",
    "ollama-js": "ollama_js.mjs",
}
