"""The heap of a process shrinks again after a burst."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tessera.engine.contract.heap import GROWTH, HeapTrimmer

BURST = """
from tessera.engine.contract.heap import HeapTrimmer, bound_heap, resident_bytes
bound_heap()
trimmer = HeapTrimmer()
before = resident_bytes()
kept = [bytes(1000) for _ in range(60_000)]  # beyond what Python allocates itself
most = resident_bytes()
kept = kept[-1:]  # at the end of the heap, which glibc alone would never cut off before it
trimmer.look()
print(most - before, resident_bytes() - before)
"""


def test_a_process_that_has_grown_is_trimmed_once() -> None:
    sizes, trims = [0], []
    trimmer = HeapTrimmer(resident=lambda: sizes[0], trim=lambda: trims.append(sizes[0]))
    for sizes[0] in (GROWTH, GROWTH + 1, GROWTH + 1, 2 * GROWTH, 5, GROWTH + 5, GROWTH + 6):
        trimmer.look()
    assert trims == [GROWTH + 1, GROWTH + 6]


def test_fault_stalls_what_loading_has_used_goes_back_before_requests_come() -> None:
    """A hundred megabytes, given back five seconds later, held up the engine's thread for 26 ms."""
    sizes, trims = [3 * GROWTH], []

    def trim() -> None:
        trims.append(sizes[0])
        sizes[0] = GROWTH

    trimmer = HeapTrimmer(resident=lambda: sizes[0], trim=trim)
    trimmer.start()
    assert trims == [3 * GROWTH]
    for sizes[0] in (2 * GROWTH, 2 * GROWTH + 1):
        trimmer.look()
    trimmer.stop()
    assert trims == [3 * GROWTH, 2 * GROWTH + 1], "growth since then counts"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    assert grown > 50 * 2**20
    assert left < grown / 5
