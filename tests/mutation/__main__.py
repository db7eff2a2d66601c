"""Run mutants of a module against tests, and list those that no test notices.

The tests run in forked processes, one mutant after the other; the working tree is not touched.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.mutation.mutants import mutants_of
from tests.mutation.trial import Seconds, preload, run_tests
from tests.support.paths import ROOT

LONGEST = Seconds(3600.0, 3600.0)  # without a mutant
FACTOR = Seconds(4.0, 2.0)  # times that a mutant's tests may take
SLACK = Seconds(20.0, 3.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("module", help="such as tessera.engine.core.scheduler")
    parser.add_argument("--tests", nargs="+", required=True, help="files of tests, the fastest first")
    parser.add_argument(
        "--deselect", nargs="+", default=[], help="tests to leave out, such as those that run the module in a process"
    )
    parser.add_argument("--sample", type=int, help="so many mutants of all, chosen by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", help="only those of these lines, FIRST-LAST")
    given = parser.parse_args()
    mutants = mutants_of(source_of(given.module).read_text())
    if given.lines:
        first, last = map(int, given.lines.split("-"))
        mutants = [mutant for mutant in mutants if first <= mutant.line <= last]
    chosen = mutants
    if given.sample is not None and given.sample < len(mutants):
        chosen = sorted(random.Random(given.seed).sample(mutants, given.sample), key=lambda mutant: mutant.line)
    preload(given.module, given.tests)
    tests = [*given.tests, *(f"--deselect={test}" for test in given.deselect)]
    outcome, took = run_tests(given.module, None, tests, LONGEST)
    if outcome != "passed":
        print("the tests fail without a mutant")
        return 2
    print(
        f"{given.module}: {len(chosen)} of {len(mutants)} mutants, seed {given.seed}; {took.cpu:.1f} s each", flush=True
    )
    limit = Seconds(FACTOR.wall * took.wall + SLACK.wall, FACTOR.cpu * took.cpu + SLACK.cpu)
    survivors = []
    for mutant in chosen:
        outcome, _ = run_tests(given.module, mutant, tests, limit)
        if outcome == "passed":
            survivors.append(mutant)
            print(f"  survived: {mutant}", flush=True)
        elif outcome == "late":
            print(f"  killed, as its tests took too long: {mutant}", flush=True)
    killed = len(chosen) - len(survivors)
    print(f"{given.module}: {killed} of {len(chosen)} killed ({killed / max(len(chosen), 1):.0%})")
    return 1 if survivors else 0


def source_of(module: str) -> Path:
    """The file of a module of the project, found without importing it."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    assert path.is_file(), f"there is no {path}"
    return path


if __name__ == "__main__":
    sys.exit(main())
