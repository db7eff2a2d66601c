"""`make prove-gpu`: every figure that is promised of a GPU, measured in one go, with a table of what is kept.

    python -m tests.bench.promises --minutes 9 --part tests --part GGUF

The bounds are those of an H200. Where there are several GPUs, parts run side by side. A folder of
--output has each part's log. Exit code 1: something that was measured is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.promises.campaign import Campaign, Outcome
from tests.bench.promises.parts import PARTS


def visible_gpus() -> list[str]:
    """Their names for CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number in range(len(listed.splitlines()))]


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table("part", "figure", "found", "promised", "", title="What is promised of a GPU")
    for outcome in outcomes:
        name = f"{outcome.part.name} ({outcome.ended}, {outcome.seconds:.0f} s)"
        rows = list(zip(outcome.part.figures, outcome.values, strict=False))
        if not rows:
            table.add_row(name, "", "", "", "see its log" if outcome.ended == "done" else "")
        for number, (figure, value) in enumerate(rows):
            shown = "none" if value is None else f"{value:,.6g}"
            kept = "" if value is None else "kept" if figure.is_kept(value) else "[bold]not kept[/bold]"
            table.add_row("" if number else name, figure.name, shown, figure.bound, kept)
    return table


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.promises", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=names, help="in this order (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=120.0, help="in all; parts that would take longer are left out"
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="run even those beside others that want the machine alone"
    )
    parser.add_argument("--base", type=Path, help="checkout of another commit, for the loads beside it")
    parser.add_argument("--output", type=Path, default=Path(".out/promises"), help="folder for logs (%(default)s)")
    options = parser.parse_args()
    gpus = visible_gpus()
    if not gpus:
        print("promises: there is no GPU", file=sys.stderr)
        return 2
    console, begin = Console(width=150), time.monotonic()
    chosen = [next(part for part in PARTS if part.name == name) for name in options.part or names]
    base = options.base.resolve() if options.base is not None else None
    campaign = Campaign(
        options.output.resolve(),
        gpus,
        begin + 60 * options.minutes,
        base,
        lambda text: console.print(f"{time.monotonic() - begin:5.0f} s  {text}", markup=False, highlight=False),
        options.side_by_side,
    )
    outcomes = campaign.run(chosen)
    console.print(table_of(outcomes))
    figures = {
        outcome.part.name: {
            "ended": outcome.ended,
            "seconds": round(outcome.seconds, 1),
            "figures": {
                figure.name: value for figure, value in zip(outcome.part.figures, outcome.values, strict=False)
            },
        }
        for outcome in outcomes
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "promises.json").write_text(json.dumps(figures, indent=1))
    measured = [outcome for outcome in outcomes if not outcome.ended.startswith("left out")]
    return 0 if all(outcome.is_kept for outcome in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
