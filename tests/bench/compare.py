"""Loads of two checkouts in turn on one machine: `python -m tests.bench.compare BASE --rounds 2 --repeats 3`.

BASE is a folder with another commit of the project. Each round measures its server, then this checkout's, so that a
slow drift of the machine falls on both. The client is this checkout's for both: BASE's might take its times elsewhere.

Streams that begin together stay together, and whether the middle one's prompt is in the first step or in the second
is chance: of one commit, median first tokens differ by half. So each load runs several times, and each change has its
standard error. The last line is JSON, in percent: the worst change, and the worst of what remains of a change when two
standard errors are taken off.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.paths import ROOT

FIGURES = {
    "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT ms",
    "median_itl_ms": "ITL ms",
    "ready_seconds": "ready s",
}
HIGHER_IS_BETTER = {"output_throughput"}


def measure(checkout: Path, output: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Rows of the loads of the server in `checkout`."""
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.bench", "--only", "loads", "--output", str(output), *arguments]
    with (output / "log").open("wb") as log:
        subprocess.run([*command, "--checkout", str(checkout)], cwd=ROOT, check=True, stdout=log, stderr=log)
    rows: list[dict[str, Any]] = json.loads((output / "bench.json").read_text())["loads"]
    return rows


def load_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "concurrency", "input_len", "output_len", "stream"))


def _standard_error(values: list[float]) -> float:
    """Of their mean, relative to it; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.mean(values)


def compared(base: list[list[dict[str, Any]]], own: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means of each load's figures over all runs, and by how much this checkout is better, in percent, with errors."""
    rows = []
    for load in dict.fromkeys(map(load_of, base[0])):
        for figure in FIGURES:
            before, after = (
                [row[figure] for rows_of_round in rounds for row in _runs(rows_of_round, load, figure)]
                for rounds in (base, own)
            )
            if not after or None in before or not statistics.mean(before):
                continue
            ratio = statistics.mean(after) / statistics.mean(before)
            change = 100 * (ratio - 1)
            rows.append(
                {
                    "load": load,
                    "figure": figure,
                    "before": statistics.mean(before),
                    "after": statistics.mean(after),
                    "spread": 100 * (max(before) / min(before) - 1),
                    "better": change if figure in HIGHER_IS_BETTER else -change,
                    "error": 100 * ratio * math.hypot(_standard_error(before), _standard_error(after)),
                }
            )
    return rows


def _runs(rows: list[dict[str, Any]], load: tuple[Any, ...], figure: str) -> list[dict[str, Any]]:
    """The rows of a load in one round; a server has one time to get ready for all of them."""
    found = [row for row in rows if load_of(row) == load]
    return found[:1] if figure == "ready_seconds" else found


def beyond_error(row: dict[str, Any]) -> float:
    """Its change, two standard errors nearer to none."""
    change: float = row["better"]
    return math.copysign(max(abs(change) - 2 * row["error"], 0.0), change)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compare", description=__doc__)
    parser.add_argument("base", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=2, help="of both servers (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each load of a server (%(default)s)")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--streams", type=int, nargs="+", help="loads of so many streams")
    parser.add_argument("--output", type=Path, default=Path(".out"))
    options = parser.parse_args()
    arguments = [word for name in options.model for word in ("--model", name)]
    arguments += ["--repeats", str(options.repeats)]
    if options.streams:
        arguments += ["--streams", *map(str, options.streams)]
    base, own = [], []
    for number in range(options.rounds):
        base.append(measure(options.base.resolve(), options.output.resolve() / f"base{number}", arguments))
        own.append(measure(ROOT, options.output.resolve() / f"own{number}", arguments))
    rows = compared(base, own)
    table = Table(
        "model", "streams", "in/out", "figure", "before", "after", "better %", "error %", "spread of before %"
    )
    for row in rows:
        model, streams, input_len, output_len, stream = row["load"]
        lengths = f"{input_len}/{output_len}{'' if stream else ' whole'}"
        table.add_row(
            model,
            str(streams),
            lengths,
            FIGURES[row["figure"]],
            f"{row['before']:.2f}",
            f"{row['after']:.2f}",
            f"{row['better']:+.1f}",
            f"{row['error']:.1f}",
            f"{row['spread']:.1f}",
        )
    Console(width=130).print(table)
    worst = min(rows, key=lambda row: row["better"])
    surely = min(rows, key=beyond_error)
    found = {"worst": worst["better"], "figure": worst["figure"], "load": worst["load"]}
    print(json.dumps({**found, "beyond_error": beyond_error(surely), "of": [surely["figure"], surely["load"]]}))
    (options.output / "compare.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
