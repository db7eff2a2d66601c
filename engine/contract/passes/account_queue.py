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
        items = self._items.get(account_id)
        if items is None:
            items = self._items[account_id] = deque()
        items.append(item)

    def take(self) -> T:
        """The next item. Raises KeyError where there is none."""
        for account_id, items in self._items.items():
            item = items.popleft()
            if not items:
                del self._items[account_id]
            elif len(self._items) > 1:
                self._items.move_to_end(account_id)
            return item
        raise KeyError
