"""Turns of the models that wait for room: which is loaded next, and which of the loaded ones make way for it.

Start-time fair queueing (Goyal et al. 1996, "Start-time Fair Queuing") among accounts, in which every load counts the
same. A model waits on behalf of the account, of all whose requests wait for it, that is before the others. One account
never has a turn against itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.app.engines.pooled_model import PooledModel

TURN = 60.0  # seconds that a model is used without a pause, after which it makes way for one that others wait for


@dataclass(eq=False)
class Waiting:
    """A model that waits for room.

    Attributes:
        since: `time.monotonic()` of its arrival.
        arrived: virtual time of it.
        is_next: others make way for it already.
    """

    model: PooledModel
    since: float
    arrived: int
    is_next: bool = False


class Turns:
    """The models that wait, and how far each account is ahead.

    Virtual time is that of the last load. A model's place is never before the virtual time of its arrival, so a pause
    saves nothing up, and accounts that come later, however many, pass no model over for ever.
    """

    def __init__(self) -> None:
        self._line: list[Waiting] = []
        self._time = 0
        self._ahead: dict[int, int] = {}  # by account: virtual time before which it has no other load

    def join(self, model: PooledModel, now: float) -> Waiting:
        waiting = Waiting(model, now, self._time)
        self._line.append(waiting)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        self._line.remove(waiting)

    def take(self, waiting: Waiting) -> None:
        """The model is loaded, which counts for all accounts that it is for."""
        self._time = max(self._time, self._rank(waiting))
        for account in waiting.model.accounts:
            self._ahead[account] = max(waiting.arrived, self._ahead.get(account, 0)) + 1
        earliest = min(each.arrived for each in self._line)  # what is not beyond it makes no difference any more
        self._ahead = {account: time for account, time in self._ahead.items() if time > earliest}

    def first(self, models: Iterable[PooledModel], budget: float) -> Waiting | None:
        """The next of those that come to their turn."""
        line = sorted(self._line, key=lambda waiting: (not waiting.is_next, self._rank(waiting)))
        return next((waiting for waiting in line if making_way(waiting.model, models, budget) is not None), None)

    def is_before(self, model: PooledModel, models: Sequence[PooledModel], budget: float, now: float) -> bool:
        """Whether the room that there is, and that others leave, is for another account's model than `model`.

        It is for the next one that has waited for a turn, so that it is not filled again and again.
        """
        first = self.first(models, budget)
        if first is None or first.model is model or not are_of_several(first.model, model):
            return False
        if not first.is_next and now - first.since < TURN:
            return False
        leaving = making_way(first.model, models, budget)
        assert leaving is not None, "it comes to its turn"
        left = sum(other.share for other in models if other.takes_room and other not in leaving)
        return left + first.model.share + model.share > budget

    def _rank(self, waiting: Waiting) -> int:
        ahead = (self._ahead.get(account, 0) for account in waiting.model.accounts)
        return max(waiting.arrived, min(ahead, default=0))


def making_way(model: PooledModel, models: Iterable[PooledModel], budget: float) -> list[PooledModel] | None:
    """The models to unload for `model` to fit; None where all accounts are the same, so that there are no turns."""
    others = [other for other in models if other.takes_room and other is not model]
    lacking = sum(other.share for other in others) + model.share - budget
    found = []
    for other in sorted(others, key=lambda other: (not other.is_leaving, not other.makes_way, other.turn_began)):
        if lacking <= 0:
            break
        if other.is_leaving or are_of_several(model, other):
            found.append(other)
            lacking -= other.share
    return found if lacking <= 0 else None


def are_of_several(one: PooledModel, other: PooledModel) -> bool:
    """Whether two models are used, or waited for, by more than one account."""
    return len(one.accounts | other.accounts) > 1


def is_turn_over(model: PooledModel, now: float) -> bool:
    return model.makes_way or (model.state == "loaded" and now - model.turn_began >= TURN)
