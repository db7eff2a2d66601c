"""Parse the log of compute-sanitizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

HEAD = re.compile(r"^========= (?=\S)(.*)$")
NAMED = re.compile(r" at (?:void )?(\w+)[<(]")
MANGLED = re.compile(r" launching _Z(\d+)(\w+)")
NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d,]*")
TEST = re.compile(r"Host Frame: (test_\w+) in ")
SUMMARIES = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application")


class Report(NamedTuple):
    """`what`: the tool's words, without numbers. `kernel`, `test`: where it was, empty where the tool does not say."""

    what: str
    kernel: str
    test: str


def reports_of(log: str) -> Counter[Report]:
    found: Counter[Report] = Counter()
    for lines in _reports(log):
        what = re.split(" between | while launching ", lines[0])[0]
        kernels = (_kernel(line) for line in lines[:2])
        tests = (test[1] for line in lines if (test := TEST.search(line)))
        found[Report(NUMBER.sub("N", what), next(filter(None, kernels), ""), next(tests, ""))] += 1
    return found


def _reports(log: str) -> Iterator[list[str]]:
    """The lines of each report, the first one without its mark."""
    report: list[str] = []
    for line in log.splitlines():
        if head := HEAD.match(line):
            if report:
                yield report
            report = [] if head[1].startswith(SUMMARIES) else [head[1]]
        elif report:
            report.append(line)
    if report:
        yield report


def _kernel(line: str) -> str:
    if mangled := MANGLED.search(line):
        return mangled[2][: int(mangled[1])]
    named = NAMED.search(line)
    return named[1] if named else ""
