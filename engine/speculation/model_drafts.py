"""Drafts of a model: for which sequences it computes some, and what it reads before."""

from __future__ import annotations

from typing import Protocol

from tessera.engine.contract.messages import TokenIds
from tessera.engine.speculation.draft_keys import DraftKeys, DraftLimits

ON_DEVICE = -1  # in a sequence's draft: a token that the device computes before the step


def is_on_device(draft: list[int]) -> bool:
    """Whether only the device will know a draft's tokens."""
    return bool(draft) and draft[0] == ON_DEVICE


class ReadSequence(Protocol):
    """The part of a running sequence that a draft model concerns; see `engine.core.sequence.Sequence`."""

    token_ids: TokenIds
    block_table: list[int]
    num_drafter_tokens: int
    num_drafter_chunk: int


class ModelDrafts:
    """Shares the draft model's next steps among sequences.

    `step_tokens`: most tokens of a step, at least `limits.caught_up` for each running sequence.
    """

    def __init__(self, limits: DraftLimits, keys: DraftKeys, step_tokens: int) -> None:
        self._limits = limits
        self._keys = keys
        self._being_read: set[int] = set()  # blocks from which on sequences read their texts in the next step
        self._step_tokens = step_tokens
        self._room = 0  # tokens of texts that the next step may still read

    def begin_step(self, num_seqs: int) -> None:
        """A step of `num_seqs` sequences is planned."""
        self._room = self._step_tokens - self._limits.caught_up * num_seqs
        self._being_read.clear()

    def most_tokens(self, sequence: ReadSequence) -> int:
        """Most draft tokens that the model's context has room for."""
        return max(self._limits.max_model_len - len(sequence.token_ids) + 1, 0)

    def plan(self, sequence: ReadSequence, most: int) -> list[int]:
        """Set what the model reads of the sequence before the next step; -> its draft of at most `most` tokens, which
        only the device will know; [] as long as the model catches up with the text."""
        most = min(most, self.most_tokens(sequence))
        if most <= 0:
            return []
        sequence.num_drafter_tokens = max(sequence.num_drafter_tokens, self._limits.shift)
        missing = len(sequence.token_ids) - sequence.num_drafter_tokens
        if missing > self._limits.caught_up:
            if not self._begin_reading(sequence):
                return []
            missing = len(sequence.token_ids) - sequence.num_drafter_tokens
        chunk = missing
        if missing > self._limits.caught_up:
            chunk = min(missing, self._room)
            self._room -= chunk
        sequence.num_drafter_chunk = chunk
        return [ON_DEVICE] * most if chunk == missing else []

    def _begin_reading(self, sequence: ReadSequence) -> bool:
        """Skip what another sequence has read since; False where one reads the same blocks in the next step."""
        known = min(self._keys.count_tokens(sequence.block_table), len(sequence.token_ids) - 1)
        sequence.num_drafter_tokens = max(sequence.num_drafter_tokens, known)
        first = sequence.num_drafter_tokens // self._keys.block_size
        block = set(sequence.block_table[first : first + 1])  # none yet where the newest token begins one
        is_free = self._being_read.isdisjoint(block)
        self._being_read |= block
        return is_free
