"""A figure that is promised: where a benchmark prints it, and the bound."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What a benchmark left: the objects of JSON among its lines, its text, and its bench.json."""

    lines: Sequence[Row]
    text: str
    parts: Mapping[str, Sequence[Row]]

    @classmethod
    def read(cls, log: Path, folder: Path) -> Result:
        """Of a benchmark that printed into `log` and had `--output folder`."""
        text = log.read_text(errors="replace") if log.exists() else ""
        file = folder / "bench.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        return cls(_objects(text), text, found)


def _objects(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return [each for each in found if isinstance(each, dict)]


@dataclass(frozen=True)
class Figure:
    """`value` raises LookupError where the benchmark did not come so far; one of the bounds may be missing."""

    name: str
    value: Callable[[Result], float]
    at_least: float | None = None
    at_most: float | None = None

    def of(self, result: Result) -> float | None:
        try:
            return self.value(result)
        except LookupError:
            return None

    def is_kept(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    @property
    def bound(self) -> str:
        bounds = [f"at least {self.at_least:,g}"] if self.at_least is not None else []
        return ", ".join([*bounds, *([f"at most {self.at_most:,g}"] if self.at_most is not None else [])])


def load(streams: int, key: str = "output_throughput", input_len: int | None = None) -> Callable[[Result], float]:
    """Of the streamed load over HTTP with so many streams, and so long prompts where that is given."""

    def value(result: Result) -> float:
        for row in result.parts["loads"]:
            wanted = row["concurrency"] == streams and row["stream"]
            if wanted and input_len in (None, row["input_len"]) and row[key] is not None:
                return float(row[key])
        raise LookupError

    return value


def start(*, cached: bool) -> Callable[[Result], float]:
    """Seconds from the command to the first token."""

    def value(result: Result) -> float:
        for row in result.parts["start"]:
            if row["cached"] is cached:
                return float(row["first_token_s"])
        raise LookupError

    return value


def line(*keys: str | int, **having: Any) -> Callable[[Result], float]:
    """What `keys` lead to in the last object that has them, and the members of `having`."""

    def value(result: Result) -> float:
        for found in reversed(result.lines):
            inner: Any = found if all(found.get(name) == wanted for name, wanted in having.items()) else {}
            try:
                for key in keys:
                    inner = inner[key]
            except LookupError:
                continue
            return float(inner)
        raise LookupError

    return value


def quotient(above: Callable[[Result], float], below: Callable[[Result], float]) -> Callable[[Result], float]:
    return lambda result: above(result) / below(result)


def pattern(expression: str, missing: float | None = None) -> Callable[[Result], float]:
    """The last match's group as a number; `missing` where there is none, in what has been printed."""
    compiled = re.compile(expression)

    def value(result: Result) -> float:
        found = compiled.findall(result.text)
        if found:
            return float(found[-1].replace(",", ""))
        if missing is None or not result.text:
            raise LookupError
        return missing

    return value
