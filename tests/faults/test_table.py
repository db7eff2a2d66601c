"""The table in README.md: the tests that it names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", Path(__file__).with_name("README.md").read_text())))


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


def test_every_file_of_this_folder_is_in_the_table() -> None:
    here = {f"tests/faults/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert here - {"tests/faults/test_table.py"} <= {path for path, _ in NAMED}
