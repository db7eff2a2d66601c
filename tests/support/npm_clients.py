"""Clients that come as npm packages, run against the app on loopback with a model that plays a script.

They are looked for under the folder that TESSERA_CLIENTS names, build/clients by default:
`npm install --prefix build/clients @anthropic-ai/claude-code @anthropic-ai/sdk`. Tests without them are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fake_client import INFO, FakeClient, Submission, play
from tests.support.http_fixtures import TOKENIZER, ids, serve
from tests.support.paths import ROOT
from tests.support.surface_fixtures import tool_settings

FOLDER = Path(os.environ.get("TESSERA_CLIENTS", ROOT / "build" / "clients"))
PATIENCE = 120  # seconds for a whole session of a client
SPACIOUS = msgspec.structs.replace(INFO, max_model_len=2**20)  # in tokens of one byte


def package(name: str) -> Path:
    """The folder of an installed npm package; skips the test where it is not installed."""
    folder = FOLDER / "node_modules" / name
    if shutil.which("node") is None or not folder.is_dir():
        pytest.skip(f"{name} is not installed under {FOLDER}")
    return folder


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedModel:
    """A server whose model writes the completion for the number of tool results in the prompt's last turn.

    Attributes:
        prompts: the prompts so far, as text.
        url: where the server listens.
    """

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.url = ""

    @contextmanager
    def serve(self, folder: Path, write: Callable[[str], str], **changes: Any) -> Iterator[ScriptedModel]:
        """`write` makes a completion of a prompt."""

        def script(submission: Submission) -> Any:
            prompt = TOKENIZER.decode(submission.prompt, skip_special_tokens=False)
            self.prompts.append(prompt)
            return play([*ids(write(prompt)), 0], stop_token_id=0, per_output=8)

        info = msgspec.structs.replace(SPACIOUS, **changes)
        with serve(FakeClient(script, info=info), tool_settings(folder)) as self.url:
            yield self


def in_turn(completions: Sequence[str]) -> Callable[[str], str]:
    """Plays back completions, one for each result that the client's tools have given since the last question."""

    def write(prompt: str) -> str:
        turn = prompt.rsplit("<|im_start|>user\n", 1)[-1]
        return completions[min(turn.count("<|im_start|>tool\n"), len(completions) - 1)]

    return write


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """The standard output of a client that ends well; it sees nothing of this machine's own settings."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
