"""The draft model's part of the KV cache: which blocks and sequences have its keys and values.

It has a part of every KV block, so what owns a block owns both. But the draft model computes later than the served one,
and only where drafts are made: a block may have the keys of one and not yet of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLAIN_ROOM = 2  # tokens: the newest, and the last of a draft that was accepted whole


@dataclass(frozen=True)
class DraftLimits:
    """Of a draft model.

    Attributes:
        max_model_len: longest text that it reads.
        short_rope_len: where the long form of its RoPE tables begins.
        shift: it reads a token in the place of the one so many before, and the first ones not at all.
        caught_up: most tokens that it has not read of a sequence that it follows.
        rereads: it reads the accepted tokens of its drafts again, with what the served model has left of them since.
    """

    max_model_len: int
    short_rope_len: int = 0
    shift: int = 0
    caught_up: int = PLAIN_ROOM
    rereads: bool = False


class DraftKeys:
    """Of the KV blocks, those in which every token has the draft model's keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._is_complete = bytearray(num_blocks)

    def is_complete(self, block: int) -> bool:
        return bool(self._is_complete[block])

    def forget_block(self, block: int) -> None:
        """It will hold other tokens."""
        self._is_complete[block] = 0

    def forget_all(self) -> None:
        self._is_complete = bytearray(len(self._is_complete))

    def note_computed(self, block_table: Sequence[int], first: int, stop: int) -> None:
        """A sequence's tokens first..stop - 1 are computed, after all before them."""
        for block in block_table[first // self.block_size : stop // self.block_size]:
            self._is_complete[block] = 1

    def count_tokens(self, block_table: Sequence[int]) -> int:
        """Leading tokens of full blocks that are computed."""
        count = 0
        for block in block_table:
            if not self._is_complete[block]:
                break
            count += 1
        return count * self.block_size
