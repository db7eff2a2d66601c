"""Which test functions each tool has seen, over many runs: `docs/figures/sanitizers.json`.

A function is in it once all of its cases have ended well, and the tool reported nothing that they had launched.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.sanitizers.reports import Report

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


@dataclass(frozen=True)
class Seen:
    """`tests`: the function's cases. `commit`, `date`: of the run."""

    tests: int
    commit: str
    date: str


Functions = dict[str, Seen]  # by pytest's names without a case


def function_of(test: str) -> str:
    return test.partition("[")[0]


def load(file: Path) -> dict[str, Functions]:
    """By tool."""
    read = json.loads(file.read_text()) if file.exists() else {}
    return {tool: {name: Seen(**seen) for name, seen in functions.items()} for tool, functions in read.items()}


def store(file: Path, record: dict[str, Functions]) -> None:
    written = {
        tool: {name: asdict(seen) for name, seen in sorted(functions.items())}
        for tool, functions in sorted(record.items())
    }
    file.write_text(json.dumps(written, indent=1) + "\n")


def seen_whole(tests: Iterable[str], done: set[str], found: Counter[Report], *, commit: str, date: str) -> Functions:
    """The functions of `tests` that are to be recorded: those of which `done` has every case."""
    if not all(report.test for report in found):
        return {}  # it may be about any of them
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        cases[function_of(test)].append(test)
    reported = {report.test for report in found}
    return {
        name: Seen(len(of_function), commit, date)
        for name, of_function in cases.items()
        if done.issuperset(of_function) and name.rpartition("::")[2] not in reported
    }
