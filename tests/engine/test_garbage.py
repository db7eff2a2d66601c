"""Old garbage is collected when that holds up nobody, and in the end in any case."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tessera.engine.contract.heap import NEVER, YOUNG_BETWEEN, OldGarbage


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.other: Any = [self]


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


def taken_over(few: int, many: int = 10**9) -> OldGarbage:
    garbage = OldGarbage(few, many)
    gc.disable()
    garbage.take_over()
    assert gc.isenabled()
    return garbage


def grow_old(garbage: OldGarbage | None = None) -> None:
    """Until a look of `garbage` is due, even where a thread of another test has collected everything meanwhile."""
    for _ in range(YOUNG_BETWEEN):
        gc.collect(1)
    for _ in range(1000):
        if garbage is None or gc.get_count()[2] >= garbage._next_look:
            break
        gc.collect(1)


def old_cycles(number: int = 1) -> None:
    """Garbage that became so when it was old."""
    cycles = [Cycle() for _ in range(number)]
    grow_old()
    cycles.clear()


def num_cycles() -> int:
    return sum(type(one) is Cycle for one in gc.get_objects())


def test_python_never_collects_old_objects_itself() -> None:
    taken_over(few=0)
    assert gc.get_threshold()[2] == NEVER
    kept: list[Any] = []
    before = gc.get_stats()[2]["collections"]
    for _ in range(20):  # far more than a quarter of all that is there
        kept += [[] for _ in range(10_000)]
    assert gc.get_stats()[2]["collections"] == before


def test_a_few_old_objects_are_collected_at_the_next_look() -> None:
    garbage = taken_over(few=10**7)
    old_cycles()
    assert num_cycles() == 1
    assert garbage.look(is_idle=False)
    assert num_cycles() == 0
    assert not garbage.look(is_idle=True), "nothing has grown old since"


def test_many_old_objects_wait_until_few_are_left() -> None:
    garbage = taken_over(few=20_000)
    held = [object() for _ in range(50_000)]
    old_cycles()
    assert not garbage.look(is_idle=False)
    held.clear()
    assert not garbage.look(is_idle=False), "not before more has grown old"
    grow_old(garbage)
    assert garbage.look(is_idle=False)
    assert num_cycles() == 0


def test_many_old_objects_are_collected_once_nobody_waits_and_what_stays_is_not_looked_at_again() -> None:
    garbage = taken_over(few=20_000)
    held = [[index] for index in range(50_000)]
    old_cycles()
    assert not garbage.look(is_idle=False)
    grow_old(garbage)
    frozen = gc.get_freeze_count()
    assert garbage.look(is_idle=True)
    assert num_cycles() == 0
    assert gc.get_freeze_count() >= frozen + len(held)
    old_cycles()
    grow_old(garbage)
    assert garbage.look(is_idle=False), "few are left beside the frozen ones"
    assert num_cycles() == 0


def test_too_many_are_collected_in_any_case() -> None:
    garbage = taken_over(few=1000, many=30_000)
    held = [object() for _ in range(20_000)]
    grow_old(garbage)
    assert not garbage.look(is_idle=False)
    old_cycles(10_000)
    grow_old(garbage)
    assert garbage.look(is_idle=False)
    assert num_cycles() == 0
    held += [object() for _ in range(15_000)]
    grow_old(garbage)
    assert not garbage.look(is_idle=False), "not again before there are twice as many as were left"
    held += [object() for _ in range(10_000)]
    grow_old(garbage)
    assert garbage.look(is_idle=False)
