"""Loads of two checkouts in turn on one machine: `python -m tests.bench.compare BASE --rounds 2`.

BASE is a folder with another commit of the project. Each round measures its server, then this checkout's, so that a
slow drift of the machine falls on both. The client is this checkout's for both: BASE's might take its times elsewhere.
The last line is JSON: the figure that became worst, in percent.
"""

from __future__ import annotations

import argparse
import json
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


def compared(base: list[list[dict[str, Any]]], own: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per load and figure the medians of all rounds, and by how much this checkout is better, in percent."""
    rows = []
    for load in map(load_of, base[0]):
        for figure in FIGURES:
            before, after = (
                [row[figure] for rows_of_round in rounds for row in rows_of_round if load_of(row) == load]
                for rounds in (base, own)
            )
            if not after or None in before or not statistics.median(before):
                continue
            change = 100 * (statistics.median(after) / statistics.median(before) - 1)
            rows.append(
                {
                    "load": load,
                    "figure": figure,
                    "before": statistics.median(before),
                    "after": statistics.median(after),
                    "spread": 100 * (max(before) / min(before) - 1),
                    "better": change if figure in HIGHER_IS_BETTER else -change,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compare", description=__doc__)
    parser.add_argument("base", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--output", type=Path, default=Path(".out"))
    options = parser.parse_args()
    arguments = [word for name in options.model for word in ("--model", name)]
    base, own = [], []
    for number in range(options.rounds):
        base.append(measure(options.base.resolve(), options.output.resolve() / f"base{number}", arguments))
        own.append(measure(ROOT, options.output.resolve() / f"own{number}", arguments))
    rows = compared(base, own)
    table = Table("model", "streams", "in/out", "figure", "before", "after", "better %", "spread of before %")
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
            f"{row['spread']:.1f}",
        )
    Console(width=130).print(table)
    worst = min(rows, key=lambda row: row["better"])
    print(json.dumps({"worst": worst["better"], "figure": worst["figure"], "load": worst["load"]}))
    (options.output / "compare.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
