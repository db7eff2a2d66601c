"""Parse the log of compute-sanitizer."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

HEAD = re.compile(r"^========= (?=\S)(.*)$")
NAMED = re.compile(r" at (?:void )?(\w+)[<(]")
MANGLED = re.compile(r" launching _Z(\d+)(\w+)")
SUMMARIES = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application")


class Report(NamedTuple):
    """`what`: the tool's words, without numbers. `kernel` is empty where none is named."""

    what: str
    kernel: str


def reports_of(log: str) -> Counter[Report]:
    found: Counter[Report] = Counter()
    lines = log.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        head = HEAD.match(line)
        if head is None or head[1].startswith(SUMMARIES):
            continue
        what = re.split(" between | while launching ", head[1])[0]
        found[Report(re.sub(r"\d+", "N", what), _kernel(line) or _kernel(following))] += 1
    return found


def _kernel(line: str) -> str:
    if mangled := MANGLED.search(line):
        return mangled[2][: int(mangled[1])]
    named = NAMED.search(line)
    return named[1] if named else ""
