"""Which tests each tool has seen, over many runs: `docs/figures/sanitizers.json`.

A test is in it once it has ended well, and the tool reported nothing that its function had launched. The cases of a
function are there one by one until they are all there, and the function from then on.
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
    """`tests`: 1, or the function's cases. `commit`, `date`: of the run, in which the last of them has ended."""

    tests: int
    commit: str
    date: str


Recorded = dict[str, Seen]  # by pytest's names, of functions without a case


def function_of(test: str) -> str:
    return test.partition("[")[0]


def load(file: Path) -> dict[str, Recorded]:
    """By tool."""
    read = json.loads(file.read_text()) if file.exists() else {}
    return {tool: {name: Seen(**seen) for name, seen in recorded.items()} for tool, recorded in read.items()}


def store(file: Path, record: dict[str, Recorded]) -> None:
    written = {
        tool: {name: asdict(seen) for name, seen in sorted(recorded.items())}
        for tool, recorded in sorted(record.items())
    }
    file.write_text(json.dumps(written, indent=1) + "\n")


def with_run(
    recorded: Recorded, tests: Iterable[str], done: set[str], found: Counter[Report], *, commit: str, date: str
) -> Recorded:
    """The record after a run of `tests`, of which those in `done` passed."""
    if not all(report.test for report in found):
        return recorded  # it may be about any of them
    cases: defaultdict[str, set[str]] = defaultdict(set)
    for test in tests:
        cases[function_of(test)].add(test)
    reported = {report.test for report in found}
    after = dict(recorded)
    for function, of_function in cases.items():
        ended = of_function & done
        if not ended or function.rpartition("::")[2] in reported:
            continue
        if of_function <= ended | recorded.keys():
            for case in of_function:
                after.pop(case, None)
            after[function] = Seen(len(of_function), commit, date)
        elif function not in recorded:
            after |= {case: Seen(1, commit, date) for case in ended}
    return after
