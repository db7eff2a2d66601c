"""A summary of the CSV that NVIDIA's profiler prints; see `tests.bench.once`.

From the raw page: the time, instructions and stalls of each kernel. From the source page, with `--source N`: the N-th
kernel's instructions, grouped by how often warps executed them, with their share of samples and the stalls.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable

METRICS = {
    "us": "gpu__time_duration.sum",
    "% of issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "MB read": "dram__bytes_read.sum",
    "instructions of a scheduler": "smsp__inst_executed.avg",
    "cycles": "sm__cycles_active.avg",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
}
STALL, PER_ISSUE = "average_warps_issue_stalled_", "_per_issue_active.ratio"
LEAST_SHARE = 0.005  # of samples or of instructions, to be shown
MOST_STALLS = 6


def show_raw(lines: Iterable[str]) -> None:
    head, _, *rows = csv.reader(line for line in lines if line.startswith('"'))
    for row in rows:
        values = dict(zip(head, row, strict=True))
        print(values["Kernel Name"][:110])
        print("  " + ", ".join(f"{values[metric]} {name}" for name, metric in METRICS.items() if metric in values))
        stalls = Counter(
            {
                name.partition(STALL)[2].removesuffix(PER_ISSUE): float(value)
                for name, value in values.items()
                if STALL in name and name.endswith(PER_ISSUE) and value
            }
        )
        print("  " + ", ".join(f"{name} {value:.2f}" for name, value in stalls.most_common(MOST_STALLS)))


def show_source(lines: Iterable[str], number: int) -> None:
    kernels: list[list[list[str]]] = []
    for row in csv.reader(lines):
        if row[:1] == ["Kernel Name"]:
            kernels.append([])
        elif kernels:
            kernels[-1].append(row)
    head, *rows = kernels[number - 1]
    runs: list[tuple[int, int, Counter[str]]] = []  # of instructions: how many, executions of each, samples by stall
    for row in rows:
        values = dict(zip(head, row, strict=True))
        executed = int(values["Instructions Executed"])
        samples = Counter(
            {name[6:]: int(value) for name, value in values.items() if name.startswith("stall_") and "(" not in name}
        )
        if runs and runs[-1][1] == executed:
            length, _, before = runs.pop()
            runs.append((length + 1, executed, before + samples))
        else:
            runs.append((1, executed, samples))
    all_samples = sum(sum(samples.values()) for *_, samples in runs)
    all_executed = sum(length * executed for length, executed, _ in runs)
    at = 0
    for length, executed, samples in runs:
        share, part = sum(samples.values()) / all_samples, length * executed / all_executed
        if max(share, part) >= LEAST_SHARE:
            why = ", ".join(f"{name} {count / all_samples:.1%}" for name, count in samples.most_common(MOST_STALLS))
            print(f"{at:5} {length:5} x {executed:9} ({part:5.1%}) {share:5.1%}: {why}")
        at += length


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ncu", description=__doc__)
    parser.add_argument("--source", type=int, metavar="N", help="of the source page, the N-th kernel, from 1 on")
    options = parser.parse_args()
    if options.source is None:
        show_raw(sys.stdin)
    else:
        show_source(sys.stdin, options.source)


if __name__ == "__main__":
    main()
