"""The table of what NVIDIA's sanitizers have seen, from `docs/figures/sanitizers.json`."""

from __future__ import annotations

import re

from docs.generate.figures import markdown_table
from docs.generate.paths import FIGURES, ROOT
from tests.sanitizers.record import TOOLS, function_of, load

FUNCTION = re.compile(r"^ *def test_", re.MULTILINE)


def sanitizers_table() -> str:
    seen = load(FIGURES / "sanitizers.json")
    there = sum(len(FUNCTION.findall(file.read_text())) for file in (ROOT / "tests" / "gpu").rglob("test_*.py"))
    rows = []
    for tool in TOOLS:
        recorded = seen.get(tool, {})
        runs = sorted({(each.date, each.commit) for each in recorded.values()})
        functions = sum(function_of(name) == name for name in recorded)
        tests = sum(each.tests for each in recorded.values())
        rows.append([tool, ", ".join(f"{c} ({d})" for d, c in runs), f"{functions} of {there}", str(tests)])
    return markdown_table(("tool", "commits", "functions of tests", "tests"), rows, 2)
