"""The GPU tests under NVIDIA's compute-sanitizer, several at a time, on all GPUs:

    python -m tests.sanitizers memcheck --workers 12 --seconds 500 --record docs/figures/sanitizers.json

With --record a run leaves out the tests that the file has for the tool, unless they are named, and adds those that it
has seen. So what takes too long for one run is done by several. Ends with 1 where a test failed, has not run, or the
tool has found something.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path

from rich.console import Console

from tests.sanitizers import record
from tests.sanitizers.run import run_rounds
from tests.sanitizers.tables import failed_table, found_table, longest_table, running_table
from tests.support.checkout import current_commit
from tests.support.paths import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.add_argument("tool", choices=record.TOOLS)
    parser.add_argument("tests", nargs="*", help="files or functions; all if there are none")
    parser.add_argument("--workers", type=int, default=8, help="processes; each needs a few GiB of a GPU's memory")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--record", type=Path, help="a file of what the tools have seen, read and written")
    parser.add_argument("--commit", help="that is recorded (default: the current one)")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of tests and tool")
    given = parser.parse_args()
    for name in given.tests:
        if not (ROOT / name.partition("::")[0]).exists():
            parser.error(f"there is no {name}")
        if given.record and "[" in name:
            parser.error(f"with --record name functions: {name} is a case of one")
    seen = record.load(given.record) if given.record else {}
    recorded = seen.setdefault(given.tool, {})
    with tempfile.TemporaryDirectory() as folder:
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        skipped = set() if given.tests else set(recorded)
        outcome = run_rounds(given.tool, given.tests or ["tests/gpu"], skipped, given.workers, given.seconds, logs)
    if given.record:
        commit = given.commit or current_commit()
        seen[given.tool] = record.with_run(
            recorded, outcome.collected, outcome.done, outcome.found, commit=commit, date=str(date.today())
        )
        record.store(given.record, seen)
    console = Console(width=150)
    console.print(
        f"{given.tool}: {len(outcome.done)} tests ended well, {len(outcome.accounts)} failed; "
        + (f"killed after {given.seconds:.0f} s" if outcome.code is None else f"pytest's exit code is {outcome.code}")
    )
    console.print(longest_table(outcome.seconds))
    if outcome.running:
        console.print(running_table(outcome.running))
    if outcome.accounts:
        console.print(failed_table(outcome.accounts))
    if outcome.found:
        console.print(found_table(outcome.found))
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
