"""docs/extending/checkpoint-forms.md names tests that exist, at least one in each row."""

from __future__ import annotations

import ast
import re

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "extending" / "checkpoint-forms.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_form_has_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    forms = [row for row in rows if not row.startswith(("| form |", "| ---"))]
    assert len(forms) > 20
    for row in forms:
        named = TEST.findall(row.split("|")[-2])
        assert named, row
        for file, name in named:
            functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")]
            assert name in functions, f"{file} has no {name}"
