"""The tables of faults and of attacks, and the promises of SECURITY.md: the tests that they name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TABLES = (Path(__file__).with_name("README.md"), ROOT / "tests/attack/README.md", ROOT / "SECURITY.md")
NAMED = sorted(
    {found for table in TABLES for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", table.read_text())}
)


# The classes that the table must have: those of public advisories and issue threads of servers of this kind.
CLASSES = (
    "unbounded numbers",
    "token ids out of the vocabulary",
    "NaN and Inf parameters",
    "NaN logits",
    "empty and degenerate prompts",
    "one bad request ends the engine",
    "chat templates",
    "model folder runs code",
    "deserialisation",
    "grammars",
    "tool parsers",
    "HTTP layer",
    "authentication",
    "error texts",
    "tenant isolation",
    "KV life cycle",
    "liveness",
    "false health",
    "overload and drain",
    "kernels",
    "batch dependence",
)


@cache
def names_in(path: str) -> list[str]:
    tree = ast.parse((ROOT / path).read_text())
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part or "whole")
def test_what_the_table_names_exists(path: str, name: str) -> None:
    found = names_in(path)
    if name:
        assert found.count(name) == 1
    else:
        assert found
        assert all(test.startswith("test_fault_") for test in found)


def test_every_promise_names_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = re.findall(r"^- (.*(?:\n  .*)*)", text.partition("## What it does not promise")[0], re.MULTILINE)
    assert len(promises) > 15
    for promise in promises:
        assert "`tests/" in promise or "`make " in promise, promise


def test_every_class_has_a_row_with_a_test() -> None:
    rows = [line.strip("| ").split(" | ") for line in Path(__file__).with_name("README.md").read_text().splitlines()]
    tests = {row[0]: row[-1] for row in rows if len(row) == 3}
    for name in CLASSES:
        assert re.search(r"`tests/[\w/]+", tests[name]), name


def test_every_file_of_this_folder_is_in_the_table() -> None:
    here = {f"tests/faults/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert here - {"tests/faults/test_table.py"} <= {path for path, _ in NAMED}
