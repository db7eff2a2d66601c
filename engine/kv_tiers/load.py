"""Blocks on their way back to the device, for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.engine.kv_tiers.published_block import PublishedBlock
from tessera.engine.tensor import Mark


@dataclass(eq=False)
class SavedTail:
    """What a preempted sequence has computed behind its published blocks, in slots of its own.

    Attributes:
        first: index of its first block in the sequence.
        num_tokens: of the sequence, up to the tail's end.
    """

    first: int
    num_tokens: int
    slots: list[int]


@dataclass(eq=False)
class Load:
    """Copies of slots to blocks, in the order of the sequence's tokens.

    Attributes:
        published: what the slots hold; None for those of a saved tail.
        blocks: of the device, one for each slot.
        num_loaded: leading blocks that are good; fewer than were asked for after a fault.
        read_until: the clock's time beyond which files are not waited for.
        mark: of the copies, once they are submitted.
        is_done: nothing is under way any more.
    """

    published: list[PublishedBlock | None]
    slots: list[int]
    blocks: list[int] = field(default_factory=list)
    num_loaded: int = 0
    read_until: float = 0.0
    mark: Mark | None = None
    is_done: bool = False
    is_cancelled: bool = False

    def truncate(self, slot: int) -> None:
        """What `slot` was to hold cannot be read."""
        if slot in self.slots:
            self.num_loaded = min(self.num_loaded, self.slots.index(slot))
