"""A queue in which accounts take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class AccountQueue(Generic[T]):
    """First in, first out for each account, and round robin among accounts."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, deque[T]] = OrderedDict()  # the next account is first

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, account_id: int, item: T) -> None:
        self._items.setdefault(account_id, deque()).append(item)

    def take(self) -> T:
        """The next item. Raises KeyError where there is none."""
        account_id, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[account_id] = items
        return item
