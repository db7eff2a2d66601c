"""The mutator changes one place at a time, and only code; a trial runs tests against it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.mutation.mutants import mutants_of
from tests.mutation.trial import seconds_without_processor
from tests.support.paths import ROOT

SOURCE = '''
"""A docstring with 1 and True."""

def most(values: list[int], limit: int = 3) -> int | None:
    """The most, up to a limit."""
    if not values and limit > 0:
        return None
    best = values[0]
    for value in values:
        best += 1
        note(value)
    logger.warning("found %d", 1)
    assert best >= 0, "no"
    return min(best, limit)
'''


def test_each_mutant_differs_in_one_place() -> None:
    mutants = mutants_of(SOURCE)
    whats = [mutant.what for mutant in mutants]
    assert [what.split(" in ")[0] for what in whats] == [
        "3 becomes 4",
        "the condition not values and limit > 0 is always false",
        "and and or are swapped",
        "not values loses its not",
        "Gt becomes GtE",
        "0 becomes 1",
        "0 becomes 1",
        "Add becomes Sub",
        "1 becomes 2",
        "note(value) is left out",
        "return min(best, limit) returns None",
    ]
    original = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants:
        changed = ast.unparse(mutant.tree).splitlines()
        assert len([1 for old, new in zip(original, changed, strict=True) if old != new]) == 1, mutant


def test_survivors_are_listed_and_the_killed_are_not(tmp_path: Path) -> None:
    weak = tmp_path / "test_weak.py"
    weak.write_text(
        "from tessera.engine.contract.histogram import quantile\n"
        "def test_half():\n    assert quantile((1.0, 2.0), (0, 2, 0), 0.5) == 1.5\n"
    )
    command = [sys.executable, "-m", "tests.mutation", "tessera.engine.contract.histogram", "--tests", str(weak)]
    lines = (ROOT / "engine/contract/histogram.py").read_text().splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("def quantile"))
    done = subprocess.run(
        [*command, "--lines", f"{first + 3}-{first + 4}"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stderr
    assert "survived: line" in done.stdout
    assert "LtE becomes Lt in wanted <= 0" in done.stdout
    assert "returns None" not in done.stdout
    assert "2 of 4 killed" in done.stdout


def test_time_in_which_others_have_the_processor_does_not_count() -> None:
    """Else a busy machine would kill mutants that the tests let live."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    begin = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:  # on the same processor
        try:
            while (waited := seconds_without_processor(other.pid)) < 0.01:
                assert time.monotonic() < begin + 30
            assert waited <= time.monotonic() - begin
        finally:
            os.sched_setaffinity(0, processors)
            other.kill()
