"""A queue in which accounts take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Accounted(Protocol):
    account_id: int


A = TypeVar("A", bound=Accounted)


class AccountQueue(Generic[A]):
    """First in, first out for each account, and round robin among accounts."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, deque[A]] = OrderedDict()  # the next account is first

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, items: Iterable[A]) -> None:
        for item in items:
            queue = self._items.get(item.account_id)
            if queue is None:
                queue = self._items[item.account_id] = deque()
            queue.append(item)

    def take(self, most: int) -> list[A]:
        """The next items."""
        taken: list[A] = []
        while self._items and len(taken) < most:
            account_id, queue = self._items.popitem(last=False)
            num_items = 1 if self._items else most - len(taken)
            while queue and num_items:
                taken.append(queue.popleft())
                num_items -= 1
            if queue:
                self._items[account_id] = queue
        return taken
