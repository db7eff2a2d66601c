"""Code in the documentation works.

A block after `<!-- run -->` is run, with the blocks before it on its page; after `<!-- run: server -->` with the
demonstration model's server in place of http://127.0.0.1:8000. A block after `<!-- prints -->` is what the one before
it prints.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from docs.generate.blocks import markdown_files
from tests.support.paths import ROOT
from tests.support.servers.server_fixture import Server

MAX_LINES = 10
URL = "http://127.0.0.1:8000"
SEPARATOR = "--- end of block ---"
CODE = re.compile(
    r"(?:^ *<!-- (run|run: server|prints) -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^\2```$", re.DOTALL | re.MULTILINE
)


@dataclass
class Example:
    code: str
    prints: str | None = None


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def examples(path: Path, marker: str) -> list[Example]:
    found: list[Example] = []
    last = ""
    for mark, _, _, content in CODE.findall(path.read_text()):
        if mark == "prints" and last == marker:
            found[-1].prints = dedent(content)
        elif mark == marker:
            found.append(Example(dedent(content)))
        last = mark if mark != "prints" else last
    return found


def run(found: list[Example], folder: Path) -> None:
    """All blocks of a page as one script."""
    script = folder / "examples.py"
    script.write_text("".join(f"{example.code}\nprint({SEPARATOR!r}, flush=True)\n" for example in found))
    ended = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=_environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.split(f"{SEPARATOR}\n")
    for example, output in zip(found, printed, strict=False):
        if example.prints is not None:
            assert output.strip() == example.prints.strip(), example.code


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


WITH_EXAMPLES = [path for path in markdown_files() if examples(path, "run")]
WITH_SERVER = [path for path in markdown_files() if examples(path, "run: server")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    run(examples(path, "run"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_SERVER, ids=name_of)
def test_examples_with_a_server_run(path: Path, tmp_path: Path, builtin_server: Server) -> None:
    found = examples(path, "run: server")
    assert all(URL in example.code for example in found)
    run([Example(each.code.replace(URL, builtin_server.url), each.prints) for each in found], tmp_path)


@pytest.mark.parametrize("path", list(markdown_files()), ids=name_of)
def test_python_blocks_parse_and_examples_are_short(path: Path) -> None:
    for mark, _, language, content in CODE.findall(path.read_text()):
        code = dedent(content)
        if language == "python":
            ast.parse(code)
        if mark.startswith("run"):
            assert language == "python"
            assert len(code.splitlines()) <= MAX_LINES, code
