"""The heap of a process shrinks again after a burst."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tessera.engine.contract.heap import GROWTH, MAX_POSTPONED, HeapTrimmer

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
    """While a hundred megabytes go back, other threads wait up to 30 ms for memory."""
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


def test_fault_stalls_a_process_is_trimmed_when_it_is_idle() -> None:
    """Or has been busy for a minute; each process of a server with 640 clients was held up once, for 30 to 38 ms."""
    is_idle, sizes, trims = [False], [0], []
    trimmer = HeapTrimmer(lambda: is_idle[0], resident=lambda: sizes[0], trim=lambda: trims.append(sizes[0]))
    for sizes[0] in range(GROWTH + 1, GROWTH + 1 + MAX_POSTPONED):
        trimmer.look()
    assert trims == []
    is_idle[0] = True
    trimmer.look()
    assert trims == [sizes[0]]
    is_idle[0] = False
    sizes[0] += GROWTH + 1
    for number in range(2 * MAX_POSTPONED + 2):
        trimmer.look()
        assert len(trims) == 1 + (number >= MAX_POSTPONED)
    sizes[0] += GROWTH + 1
    for _ in range(MAX_POSTPONED):
        trimmer.look()
    assert len(trims) == 2, "it waits as long each time"
    trimmer.look()
    assert len(trims) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    assert grown > 50 * 2**20
    assert left < grown / 5
