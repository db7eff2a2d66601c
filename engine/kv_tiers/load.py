"""Blocks on their way back to the device, for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.engine.kv_tiers.published_block import PublishedBlock
from tessera.engine.tensor import Mark


@dataclass(eq=False)
class SavedTail:
    """Computed tokens of a preempted sequence behind its published blocks, in slots of its own.

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
        num_submitted: leading blocks whose copies are submitted.
        marks: of the copies, in the order in which they end.
        is_done: nothing is under way any more.
    """

    published: list[PublishedBlock | None]
    slots: list[int]
    blocks: list[int] = field(default_factory=list)
    num_loaded: int = 0
    read_until: float = 0.0
    num_submitted: int = 0
    marks: list[Mark] = field(default_factory=list)
    is_done: bool = False
    is_cancelled: bool = False

    @property
    def num_unsubmitted(self) -> int:
        """Blocks whose copies are to be submitted yet."""
        return 0 if self.is_cancelled else self.num_loaded - self.num_submitted

    def truncate(self, slot: int) -> None:
        """End the load before `slot`, whose contents cannot be read."""
        if slot in self.slots:
            self.num_loaded = min(self.num_loaded, self.slots.index(slot))
