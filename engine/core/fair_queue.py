"""The sequences that wait, in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

from tessera.engine.core.account import Lane, start_service
from tessera.engine.core.sequence import Sequence

_in_order = attrgetter("order")

# After so many admissions that passed over an older sequence of the same lane, or a lane of a lower rank, that one is
# next: priorities delay, but they never starve.
AGEING_ADMISSIONS = 16


class FairQueue:
    """Lanes with waiting sequences. Among lanes the one whose account was served least is first; see `account`.

    An account with nothing running is before those that run, unless it is ahead of them by more than
    `start_allowance` of service: its client waits for a first token, and theirs read on.
    """

    def __init__(self, start_allowance: float = 0.0) -> None:
        self._start_allowance = start_allowance
        self._lanes: list[Lane] = []
        self._length = 0
        self._num_outranked = 0  # admissions in a row while a lower rank waited

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All of them; across accounts in no particular order."""
        return chain.from_iterable([lane.waiting for lane in self._lanes])

    def some(self, count: int) -> list[Sequence]:
        """As many of them."""
        return self._lanes[0].waiting[:count] if len(self._lanes) == 1 else list(islice(self, count))

    def enqueue(self, sequence: Sequence) -> None:
        lane = sequence.lane
        if not lane.waiting:
            self._lanes.append(lane)
        if lane.waiting and sequence.order < lane.waiting[-1].order:
            insort(lane.waiting, sequence, key=_in_order)
        else:  # mostly
            lane.waiting.append(sequence)
        self._length += 1
        lane.account.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that does not wait."""
        lane = sequence.lane
        index = bisect_left(lane.waiting, sequence.order, key=_in_order)
        if index == len(lane.waiting) or lane.waiting[index] is not sequence:
            raise ValueError(f"{sequence.request_id} is not in the queue")
        del lane.waiting[index]
        if not lane.waiting:
            self._lanes.remove(lane)
        self._length -= 1
        lane.account.num_waiting -= 1

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that starts, and count for which others it was preferred."""
        lane = sequence.lane
        oldest = _oldest(lane)
        lane.num_passed_over = 0 if oldest is sequence else lane.num_passed_over + 1
        is_outranking = lane.rank < max(other.rank for other in self._lanes)
        self._num_outranked = self._num_outranked + 1 if is_outranking else 0
        self.remove(sequence)

    def candidates(self) -> Iterator[Sequence]:
        """Waiting sequences, the next first. One that is admitted between two of them changes the order at once."""
        if len(self._lanes) == 1:
            yield from _lane_candidates(self._lanes[0])
            return
        upcoming = [_next_of(lane) for lane in self._lanes]
        followed: dict[int, Iterator[Sequence]] = {}  # the rest of lanes that were asked for more than their first
        while upcoming:
            sequence = min(upcoming, key=self._order)
            upcoming.remove(sequence)
            lane = sequence.lane
            if id(lane) not in followed:
                rest = followed[id(lane)] = _lane_candidates(lane)
                next(rest)  # the same sequence
            yield sequence
            following = next(followed[id(lane)], None)
            if following is not None:
                upcoming.append(following)

    def turn(self, lane: Lane) -> tuple[int, float]:
        """Sort key of lanes that wait: the first is admitted first. Comparable with `Lane.turn` of those that run."""
        return lane.rank, start_service(lane.account, self._start_allowance)

    def _order(self, sequence: Sequence) -> tuple[int, float, int]:
        rank, service = self.turn(sequence.lane)
        return rank if self._num_outranked < AGEING_ADMISSIONS else -rank, service, sequence.arrival_number


def _oldest(lane: Lane) -> Sequence:
    first = lane.waiting[0]
    if first.priority == lane.waiting[-1].priority:
        return first
    return min(lane.waiting, key=attrgetter("arrival_number"))


def _next_of(lane: Lane) -> Sequence:
    return lane.waiting[0] if lane.num_passed_over < AGEING_ADMISSIONS else _oldest(lane)


def _lane_candidates(lane: Lane) -> Iterator[Sequence]:
    """The lane's sequences in order, but first one that has been passed over too often."""
    overdue = _oldest(lane) if lane.num_passed_over >= AGEING_ADMISSIONS else None
    if overdue is not None:
        yield overdue
    index = 0
    waiting = lane.waiting
    while index < len(waiting):
        sequence = waiting[index]
        if sequence is not overdue:
            yield sequence
        if index < len(waiting) and waiting[index] is sequence:
            index += 1
