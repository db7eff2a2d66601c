"""Steps of several checkouts in turn on one machine, so that a slow drift of the machine falls on all:

    python -m tests.bench.compare_steps . /tmp/variant -- llama-8b.fp8 0 --prompt 8000 --kv-cache-dtype fp8

What follows -- is as of `tests.bench.steps`. Each checkout has a process, which loads the model once and measures its
steps when it is asked to. Each round's figures are printed as they come, then their medians and, in percent, how much
shorter the steps are than the first checkout's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from tests.bench.steps import BLOCK_SIZE, add_arguments, settings_of

# Runs with a checkout's modules, which may be older than this one.
WORKER = """
import json, pathlib, sys
from tests.bench import steps
from tessera.engine.cuda.device import CudaDevice
order = json.loads(sys.argv[1])
config = steps.engine_config(order["model"], pathlib.Path(order["work"]), **order["settings"])
runner = steps.make_runner(config, CudaDevice())
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(steps.measure(runner, asked["rows"], asked["context"], prompt=asked["prompt"])), flush=True)
"""
SPARE = 128  # tokens, by which a sequence grows and its blocks are cut off
MOST_TOKENS = 9000  # of a sequence, for which there must be room
Case = tuple[int, int]  # sequences in a step, tokens of a prompt beside them


class Worker:
    """A checkout's process, ready to measure. Raises: RuntimeError with the end of its log where it is not."""

    def __init__(self, checkout: Path, order: dict[str, object], log: Path) -> None:
        self._log = log
        paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(order)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        while self._read() != "ready":
            pass

    def measure(self, case: Case, context: int) -> float:
        """Microseconds of a step."""
        rows, prompt = case
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"rows": rows, "context": context, "prompt": prompt}) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._read())["step us"])

    def _read(self) -> str:
        output: IO[str] | None = self._process.stdout
        assert output is not None
        line = output.readline()
        if not line:
            raise RuntimeError(f"the process has ended:\n{self._log.read_text()[-2000:]}")
        return line.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def workers_of(checkouts: list[Path], order: dict[str, object]) -> Iterator[list[Worker]]:
    """One after the other, since the first writes the model and fills the cache of kernels."""
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        workers = []
        for number, checkout in enumerate(checkouts):
            worker = Worker(checkout, {**order, "work": work}, Path(work) / f"{number}.log")
            workers.append(worker)
            stack.callback(worker.close)
        yield workers


def compared(found: dict[Case, list[list[float]]], names: list[str]) -> Table:
    """found[case][checkout]: of each round."""
    table = Table("rows", "prompt", "checkout", "median us", "least", "most", "shorter %")
    for (rows, prompt), of_checkouts in found.items():
        first = statistics.median(of_checkouts[0])
        for name, times in zip(names, of_checkouts, strict=True):
            median = statistics.median(times)
            figures = [f"{value:,.0f}" for value in (median, min(times), max(times))]
            table.add_row(str(rows), str(prompt), name, *figures, f"{100 * (1 - median / first):+.2f}")
    return table


def parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The options in front of `--`, and those behind it."""
    own = argparse.ArgumentParser(prog="python -m tests.bench.compare_steps", description=__doc__)
    own.add_argument("checkouts", type=Path, nargs="+")
    own.add_argument("--rounds", type=int, default=4)
    steps = argparse.ArgumentParser(prog="python -m tests.bench.compare_steps CHECKOUT... --")
    add_arguments(steps)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return own.parse_args(arguments[:end]), steps.parse_args(arguments[end + 1 :])


def shared_settings(steps: argparse.Namespace) -> dict[str, object]:
    """With as little of a KV cache as the steps need, since all checkouts share the memory."""
    tokens = max(rows * (steps.context + SPARE) + prompt for rows in steps.rows for prompt in steps.prompt)
    return {**settings_of(steps), "num_kv_blocks": (tokens + MOST_TOKENS) // BLOCK_SIZE}


def main() -> None:
    options, steps = parse(sys.argv[1:])
    cases = list(product(steps.rows, steps.prompt))
    names = [str(checkout) for checkout in options.checkouts]
    found: defaultdict[Case, list[list[float]]] = defaultdict(lambda: [[] for _ in names])
    checkouts = [checkout.resolve() for checkout in options.checkouts]
    with workers_of(checkouts, {"model": steps.model, "settings": shared_settings(steps)}) as workers:
        for turn in range(options.rounds):
            for case in cases:
                order = range(len(workers)) if turn % 2 == 0 else reversed(range(len(workers)))
                for place in order:
                    found[case][place].append(workers[place].measure(case, steps.context))
                print(f"round {turn + 1}, {case}: {[round(times[-1]) for times in found[case]]}", flush=True)
    Console(width=130).print(compared(found, names))


if __name__ == "__main__":
    main()
