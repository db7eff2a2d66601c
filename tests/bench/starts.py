"""Starts of two checkouts side by side on one machine: `python -m tests.bench.starts BASE --model llama-8b`.

BASE is a folder with another commit of the project. Each round starts its server and this one's, in turn the one and
the other first: once with no kernel cached, then with all. Times are seconds from the command.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.compare import standard_error
from tests.bench.serve import measure_start
from tests.support.paths import ROOT

FIGURES = {"ready_s": "ready", "first_token_s": "first token"}
Times = dict[tuple[Path, bool, str], list[float]]


def measure(model: str, base: Path, rounds: int, cached_starts: int, output: Path) -> Times:
    """The times of each checkout: of starts with or without kernels cached, to each of FIGURES."""
    times: Times = {}
    with tempfile.TemporaryDirectory() as work:
        for number in range(rounds):
            for checkout in (base, ROOT) if number % 2 == 0 else (ROOT, base):
                rows = measure_start(model, Path(work), output, cached_starts=cached_starts, checkout=checkout)
                for row, figure in product(rows, FIGURES):
                    times.setdefault((checkout, row["cached"], figure), []).append(row[figure])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.starts", description=__doc__)
    parser.add_argument("base", type=Path, help="folder of the other checkout")
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--cached-starts", type=int, default=3, help="of each server in a round (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path(".out"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.base.resolve()
    table = Table("model", "kernels", "to", "before s", "error s", "after s", "error s", "fastest before", "after")
    for model in options.model:
        times = measure(model, base, options.rounds, options.cached_starts, options.output)
        for cached, figure in product((False, True), FIGURES):
            sides = [times[checkout, cached, figure] for checkout in (base, ROOT)]
            cells = []
            for side in sides:
                mean = statistics.mean(side)
                cells += [f"{mean:.2f}", f"{mean * standard_error(side):.2f}"]
            fastest = [f"{min(side):.2f}" for side in sides]
            table.add_row(model, "cached" if cached else "compiled", FIGURES[figure], *cells, *fastest)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
