"""A draft model that computes nothing but notices every wrong block and every token that it was not given."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tessera.engine.core.step_batch import StepBatch

POISON = -7
MANY = 4  # tokens

Array = np.ndarray[Any, Any]


class FakeDrafts:
    """Its part of a KV cache, and the draft tokens on its device; `say` is what it says after a context.

    With a `shift` of 1 it reads a token in the place of the one before. Then what it has in the last place of a block
    is of the last sequence that shares the block. Where it `rereads`, what it stored of its own drafts must be stored
    again before a later step. Of MANY tokens `num_right` are what `say` says.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.shift = 0
        self.rereads = False
        self.num_right = MANY - 1
        self._is_of_draft = np.zeros(num_blocks * block_size, bool)
        self._token_ids = np.full(num_blocks * block_size, POISON, np.int32)
        self._positions = np.full(num_blocks * block_size, POISON, np.int32)
        self._tokens: dict[tuple[int, int], int] = {}  # by number and slot
        self.num_read = 0  # tokens of texts

    def poison(self, blocks: Iterable[int]) -> None:
        """They are fatal to read before they are stored again."""
        for each in (self._token_ids, self._positions):
            each.reshape(-1, self._block_size)[list(blocks)] = POISON

    def lose_memory(self) -> None:
        self._token_ids[:] = self._positions[:] = POISON

    def token(self, number: int, slot: int) -> int:
        return self._tokens[number, slot]

    def as_array(self, num_slots: int) -> Array:
        """[K, num_slots]"""
        found = np.full((max([number for number, _ in self._tokens], default=0) + 1, num_slots), POISON, np.int32)
        for (number, slot), token_id in self._tokens.items():
            found[number, slot] = token_id
        return found

    def execute(
        self,
        number: int,
        batch: StepBatch,
        tables: Mapping[int, Mapping[int, int]],
        texts: Callable[[int], list[int]],
        say: Callable[[Array], int],
    ) -> None:
        """A step of `StepBatch.drafting`; `texts` has what is known of the sequence in a slot."""
        slots = np.repeat(batch.table_rows, np.diff(batch.cu_seqlens_q)).tolist()
        token_ids = [
            self._tokens[number - 1, slot] if token_id < 0 else token_id
            for slot, token_id in zip(slots, batch.input_ids.tolist(), strict=True)
        ]
        assert all(
            token_id >= 0 or token_id == -1 - slot for slot, token_id in zip(slots, batch.input_ids, strict=True)
        )
        self.num_read += len(token_ids) * (number == 0)
        self._token_ids[batch.slot_mapping] = token_ids
        self._positions[batch.slot_mapping] = batch.positions
        self._is_of_draft[batch.slot_mapping] = self.rereads and number > 0
        same = self._token_ids[batch.slot_mapping] == token_ids
        assert (same | self._is_of_any(batch.slot_mapping)).all(), "two sequences store the same in shared blocks"
        sampled = set(batch.logits_indices.tolist())
        for row, slot in enumerate(batch.table_rows.tolist()):
            length, last = int(batch.context_lens[row]), int(batch.cu_seqlens_q[row + 1]) - 1
            columns = np.arange(length) // self._block_size
            where = np.array([tables[slot][column] for column in columns.tolist()]) * self._block_size
            where += np.arange(length) % self._block_size
            context, text = self._token_ids[where], texts(slot)
            first_row = int(batch.positions[last]) - (length - 1)
            assert np.array_equal(self._positions[where], first_row + np.arange(length)), "other positions"
            drafted = [self._tokens[each, slot] for each in range(length + self.shift - len(text))]
            known = np.array((text + drafted)[: length + self.shift], np.int32)
            same = context == known[self.shift :]
            assert (same | self._is_of_any(where)).all(), "the draft model has not read the text"
            stale = self._is_of_draft[where] & ~self._is_of_any(where)
            assert number or not stale.any(), "accepted drafts are not read again"
            if last in sampled:
                assert len(known) == len(text) + number, "a draft token follows all that is known"
                self._tokens[number, slot] = draft_token(known, say, self.num_right)
        positions = dict(zip(batch.sampling.slots.tolist(), batch.sampling.positions.tolist(), strict=True))
        assert positions == {slot: len(texts(slot)) + number for slot in positions}

    def _is_of_any(self, where: Array) -> Array:
        return (where % self._block_size == self._block_size - 1) & (self.shift > 0)


def draft_token(context: Array, say: Callable[[Array], int], num_right: int) -> int:
    """Right in `num_right` of MANY contexts."""
    if (context < 0).any():
        return -1
    return say(context) if zlib.crc32(context.tobytes()) % MANY >= MANY - num_right else 5
