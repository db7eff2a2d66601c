"""Old garbage is collected when no request waits for it, and eventually in any case.

Each test has a process of its own, in which no thread that other tests have left collects anything.
"""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tessera.engine.contract.heap import NEVER, YOUNG_BETWEEN, OldGarbage
from tests.support.paths import ROOT


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.other: Any = [self]


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """`test` in a process of its own."""

    @functools.wraps(test)
    def run() -> None:
        code = f"from {test.__module__} import {test.__name__} as test; test.__wrapped__()"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    return run


def taken_over(few: int, many: int = 10**9) -> OldGarbage:
    garbage = OldGarbage(few, many)
    gc.disable()
    garbage.take_over()
    assert gc.isenabled()
    return garbage


def grow_old() -> None:
    for _ in range(YOUNG_BETWEEN):
        gc.collect(1)


def old_cycles(number: int = 1) -> None:
    """Garbage that became so when it was old."""
    cycles = [Cycle() for _ in range(number)]
    grow_old()
    cycles.clear()


def num_cycles() -> int:
    return sum(type(one) is Cycle for one in gc.get_objects())


@alone
def test_python_never_collects_old_objects_itself() -> None:
    taken_over(few=0)
    assert gc.get_threshold()[2] == NEVER
    kept: list[Any] = []
    before = gc.get_stats()[2]["collections"]
    for _ in range(20):  # far more than a quarter of all that is there
        kept += [[] for _ in range(10_000)]
    assert gc.get_stats()[2]["collections"] == before


@alone
def test_a_few_old_objects_are_collected_at_the_next_look() -> None:
    garbage = taken_over(few=10**7)
    old_cycles()
    assert num_cycles() == 1
    assert garbage.look(is_idle=False)
    assert num_cycles() == 0
    assert not garbage.look(is_idle=True), "nothing has grown old since"


@alone
def test_many_old_objects_wait_until_few_are_left() -> None:
    garbage = taken_over(few=20_000)
    held = [object() for _ in range(50_000)]
    old_cycles()
    assert not garbage.look(is_idle=False)
    held.clear()
    assert not garbage.look(is_idle=False), "not before more has grown old"
    grow_old()
    assert garbage.look(is_idle=False)
    assert num_cycles() == 0


@alone
def test_many_old_objects_are_collected_once_nobody_waits_and_what_stays_is_not_looked_at_again() -> None:
    garbage = taken_over(few=20_000)
    held = [[index] for index in range(50_000)]
    old_cycles()
    assert not garbage.look(is_idle=False)
    grow_old()
    frozen = gc.get_freeze_count()
    assert garbage.look(is_idle=True)
    assert num_cycles() == 0
    assert gc.get_freeze_count() >= frozen + len(held)
    old_cycles()
    assert garbage.look(is_idle=False), "few are left beside the frozen ones"
    assert num_cycles() == 0


@alone
def test_objects_are_not_many_by_the_time_that_requests_come() -> None:
    """Objects of late imports and first requests are collected at an idle moment, before they are many."""
    garbage = taken_over(few=20_000)
    held = [[index] for index in range(2000)]
    gc.collect(1)
    assert not garbage.look(is_idle=True), "these are few"
    held += [[index] for index in range(20_000)]
    assert not garbage.look(is_idle=False)
    gc.collect(1)
    frozen = gc.get_freeze_count()
    assert garbage.look(is_idle=True)
    assert gc.get_freeze_count() >= frozen + len(held)
    assert not garbage.look(is_idle=True)


@alone
def test_too_many_are_collected_in_any_case() -> None:
    garbage = taken_over(few=1000, many=30_000)
    held = [object() for _ in range(20_000)]
    grow_old()
    assert not garbage.look(is_idle=False)
    old_cycles(10_000)
    assert garbage.look(is_idle=False)
    assert num_cycles() == 0
    held += [object() for _ in range(15_000)]
    grow_old()
    assert not garbage.look(is_idle=False), "not again before there are twice as many as were left"
    held += [object() for _ in range(10_000)]
    grow_old()
    assert garbage.look(is_idle=False)
