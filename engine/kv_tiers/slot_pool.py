"""Slots of host memory: which are free, which hold a published block, and which are in use by a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from tessera.engine.kv_tiers.published_block import NOWHERE, PublishedBlock


class SlotPool:
    """Places for `num_slots` blocks. A slot is in exactly one of three places:

        free    holds nothing
        kept    holds a published block, or will once a copy is done
        private holds nothing that can be found; it becomes free with its last pin

    A pinned slot is neither evicted nor free: a copy or a file's thread uses it, or a preempted sequence has it.

    Attributes:
        kept: in the order of eviction.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.kept: OrderedDict[int, PublishedBlock] = OrderedDict()
        self.private: set[int] = set()
        self.pins = [0] * num_slots

    def take(self) -> tuple[int | None, PublishedBlock | None]:
        """A slot to fill, still in no place, and what was evicted for it; (None, None) if all are pinned."""
        if self.free:
            return self.free.pop(), None
        for slot, published in self.kept.items():
            if not self.pins[slot]:
                del self.kept[slot]
                published.slot = NOWHERE
                return slot, published
        return None, None

    def keep(self, slot: int, published: PublishedBlock) -> None:
        """A slot from `take` holds a published block from now on, or from the end of a copy."""
        published.slot = slot
        self.kept[slot] = published

    def keep_privately(self, slot: int) -> None:
        """A slot from `take` holds something of one owner, who has a pin on it."""
        self.private.add(slot)
        self.pins[slot] += 1

    def use(self, slot: int) -> None:
        """A kept slot is evicted last."""
        self.kept.move_to_end(slot)

    def drop(self, published: PublishedBlock) -> None:
        """A published block is found here no more."""
        slot, published.slot = published.slot, NOWHERE
        del self.kept[slot]
        if self.pins[slot]:
            self.private.add(slot)
        else:
            self.free.append(slot)

    def pin(self, slot: int) -> None:
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self.pins[slot] -= 1
        if not self.pins[slot] and slot in self.private:
            self.private.remove(slot)
            self.free.append(slot)

    def oldest(self, count: int) -> Iterator[PublishedBlock]:
        """What is evicted next."""
        return islice(self.kept.values(), count)
