"""Loads of two checkouts side by side on one machine: `python -m tests.bench.compare BASE --repeats 3`.

BASE is a folder with another commit of the project. Both servers stay up and are given each load in turn, so that a
slow drift of the machine falls on both; the one that waits has nothing to do. The client is this checkout's for both:
BASE's might take its times elsewhere.

Streams that begin together stay together, and whether the middle one's prompt is in the first step or in the second
is chance: of one commit, median first tokens differ by half. So each load runs several times, and each change has its
standard error. Each run's figures are printed when it ends, BASE's first. With `--seconds` as many runs count as there
was time for. The last line is JSON, in percent: the worst change, and the worst of what remains of a change when two
standard errors are taken off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.models import CONFIGS
from tests.bench.serve import LOADS, Load, measure_load, model_server, of_streams
from tests.support.paths import ROOT

FIGURES = {
    "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT ms",
    "median_itl_ms": "ITL ms",
    "ready_seconds": "ready s",
}
HIGHER_IS_BETTER = {"output_throughput"}
HALF, BOTH = "0.45", "0.9"  # of the GPU's memory in use once the server is up: of BASE's, and of both


def measure(
    model: str, loads: tuple[Load, ...], options: argparse.Namespace, deadline: float, number: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the loads of both servers, as many of the one as of the other."""
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as servers:
        sides = []
        for name, checkout, share in (("base", options.base.resolve(), HALF), ("own", ROOT, BOTH)):
            log = options.output / f"{name}-{model}-{number}.log"
            memory = () if "cpu" in options.server else ("--gpu-memory-utilization", share)
            server = model_server(model, loads, Path(work), log, *memory, *options.server, checkout=checkout)
            sides.append(servers.enter_context(server))
        for repeat, (place, load) in product(range(options.repeats), enumerate(loads)):
            if rows[0] and time.monotonic() > deadline:
                break
            found: dict[int, dict[str, Any]] = {}
            for side in (0, 1) if repeat % 2 == 0 else (1, 0):
                url, ready_seconds = sides[side]
                measured = measure_load(url, model, load, repeat * len(loads) + place)
                found[side] = {"ready_seconds": ready_seconds, **measured}
            for side, row in found.items():
                rows[side].append(row)
            print(f"{model} {load.concurrency} x {load.input_len}/{load.output_len}", figures_of(found), flush=True)
    return rows


def figures_of(found: dict[int, dict[str, Any]]) -> str:
    """Of both servers, as they are printed behind a run."""
    return ", ".join(
        f"{name} {found[0][figure]:.1f} {found[1][figure]:.1f}"
        for figure, name in FIGURES.items()
        if found[0][figure] is not None and found[1][figure] is not None
    )


def load_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "concurrency", "input_len", "output_len", "stream"))


def standard_error(values: list[float]) -> float:
    """Of their mean, relative to it; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.mean(values)


def compared(base: list[list[dict[str, Any]]], own: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means of each load's figures over all runs, and by how much this checkout is better, in percent, with errors."""
    rows = []
    for load in dict.fromkeys(load_of(row) for rows_of_round in base for row in rows_of_round):
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
                    "error": 100 * ratio * math.hypot(standard_error(before), standard_error(after)),
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
    parser.add_argument("--rounds", type=int, default=1, help="of both servers (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each load of a server (%(default)s)")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--streams", type=int, nargs="+", help="loads of so many streams")
    parser.add_argument("--input-len", type=int, help="only loads whose prompts have so many tokens")
    parser.add_argument("--streamed", action="store_true", help="only loads whose answers are streamed")
    parser.add_argument("--output-len", type=int, help="tokens of each answer, instead of the loads' own")
    parser.add_argument("--num-prompts", type=int, help="of each load, instead of its own")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after them no run begins")
    parser.add_argument("--output", type=Path, default=Path(".out"))
    parser.add_argument("server", nargs="*", help="options of both servers, after --")
    options = parser.parse_intermixed_args()
    options.output.mkdir(parents=True, exist_ok=True)
    loads = LOADS if options.streams is None else of_streams(LOADS, options.streams)
    loads = tuple(load for load in loads if load.stream or not options.streamed)
    loads = tuple(load for load in loads if options.input_len in (None, load.input_len))
    own_lengths = {"output_len": options.output_len, "num_prompts": options.num_prompts}
    loads = tuple(replace(load, **{name: value for name, value in own_lengths.items() if value}) for load in loads)
    models = options.model or list(CONFIGS)
    begin = time.monotonic()
    base, own = [], []
    for place, (number, model) in enumerate(product(range(options.rounds), models), 1):
        deadline = begin + options.seconds * place / (options.rounds * len(models))
        of_base, of_own = measure(model, loads, options, deadline, number)
        base.append(of_base)
        own.append(of_own)
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
