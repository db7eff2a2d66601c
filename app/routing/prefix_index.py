"""Which replicas have which prefixes in their caches, as far as is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Key: TypeAlias = bytes  # a block and all before it: a link of a chain of hashes


class PrefixIndex:
    """Keys by replica, at most `capacity` of each: beyond it the longest unused goes, as in the replicas' own caches.

    A wrong entry costs a hit, never a wrong answer. Replicas are numbers from 0; a key's replicas are the bits of an
    integer, so that a prompt is looked up in time that hardly depends on their number.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._replicas: dict[Key, int] = {}
        self._recent: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        """Entries of all replicas."""
        return sum(map(len, self._recent.values()))

    def set_capacity(self, capacity: int) -> None:
        """Of each replica, from now on."""
        self._capacity = capacity
        for replica, recent in self._recent.items():
            self._shorten(replica, recent)

    def store(self, replica: int, keys: Sequence[Key]) -> None:
        """The replica has this prefix, or is about to compute it; `keys` are in the order of the chain.

        They count as used now, the last key first, so that of a prefix the end goes before the beginning.
        """
        recent = self._recent.setdefault(replica, OrderedDict())
        bit = 1 << replica
        for key in reversed(keys):
            if key in recent:
                recent.move_to_end(key)
            else:
                recent[key] = None
                self._replicas[key] = self._replicas.get(key, 0) | bit
        self._shorten(replica, recent)

    def evict(self, replica: int, keys: Iterable[Key]) -> None:
        """The replica no longer has these."""
        recent = self._recent.get(replica) or OrderedDict()
        for key in keys:
            if key in recent:
                del recent[key]
                self._forget(replica, key)

    def clear(self, replica: int) -> None:
        """The replica's cache is empty, or the replica is gone."""
        for key in self._recent.pop(replica, ()):
            self._forget(replica, key)

    def matches(self, keys: Sequence[Key], replicas: int) -> Iterator[tuple[int, int]]:
        """The longest prefix of each of `replicas`, the bits of an integer.

        -> (number of keys, the replicas with a prefix of just this length), the shortest first.
        """
        for depth, key in enumerate(keys):
            having = self._replicas.get(key, 0) & replicas
            if having != replicas:
                yield depth, replicas & ~having
                if not having:
                    return
                replicas = having
        yield len(keys), replicas

    def _shorten(self, replica: int, recent: OrderedDict[Key, None]) -> None:
        while len(recent) > self._capacity:
            key, _ = recent.popitem(last=False)
            self._forget(replica, key)

    def _forget(self, replica: int, key: Key) -> None:
        others = self._replicas[key] & ~(1 << replica)
        if others:
            self._replicas[key] = others
        else:
            del self._replicas[key]
