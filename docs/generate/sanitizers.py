"""The table of what NVIDIA's sanitizers have seen, from `docs/figures/sanitizers.json`."""

from __future__ import annotations

import re

from docs.generate.figures import markdown_table
from docs.generate.paths import FIGURES, ROOT
from tests.sanitizers.record import TOOLS, load

FUNCTION = re.compile(r"^ *def test_", re.MULTILINE)


def sanitizers_table() -> str:
    seen = load(FIGURES / "sanitizers.json")
    there = sum(len(FUNCTION.findall(file.read_text())) for file in (ROOT / "tests" / "gpu").rglob("test_*.py"))
    rows = []
    for tool in TOOLS:
        functions = seen.get(tool, {}).values()
        runs = sorted({(function.date, function.commit) for function in functions})
        tests = sum(function.tests for function in functions)
        rows.append([tool, ", ".join(f"{c} ({d})" for d, c in runs), f"{len(functions)} of {there}", str(tests)])
    return markdown_table(("tool", "commits", "functions of tests", "tests"), rows, 2)
