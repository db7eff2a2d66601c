"""Where the tokens of drafts lie in a step that verifies them: all that follows from their lengths."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

MAX_LAYOUTS = 256  # that are kept, of a few kilobytes each

Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]


class Rounds:
    """The order of the sampled rows of sequences with `num_drafts` [N] draft tokens; see `StepBatch.rounds`.

    Attributes:
        order: [S] each row's sequence.
        depths: [S] draft tokens before each row.
        sizes: of the rounds; () where there is no draft.
        drafted: of each sequence with a draft its index, ascending, and the rows behind its draft tokens.
    """

    sizes: tuple[int, ...]

    def __init__(self, num_drafts: Int32Array) -> None:
        most = int(num_drafts.max(initial=0))
        self.drafted: list[tuple[int, list[int]]] = []
        if not most:
            self.sizes = ()
            self.order, self.depths = np.arange(len(num_drafts)), np.zeros(len(num_drafts), np.int32)
            return
        members = [np.flatnonzero(num_drafts >= depth) for depth in range(most + 1)]
        self.sizes = tuple([len(each) for each in members])
        self.order = np.concatenate(members)
        self.depths = np.repeat(np.arange(most + 1, dtype=np.int32), [len(each) for each in members])
        rows: dict[int, list[int]] = {}
        for row, index in enumerate(self.order[len(num_drafts) :].tolist(), len(num_drafts)):
            rows.setdefault(index, []).append(row)
        self.drafted = sorted(rows.items())


class DraftLayout:
    """Of a step that verifies drafts and does no more, with a token and `num_drafts` [R] draft tokens a sequence.

    Attributes:
        rounds: of the sampled rows, which all tokens have.
        counts: [R] tokens of each sequence.
        rows, offsets: [T] each token's sequence, and its place among the tokens of that.
        cu_seqlens_q, logits_indices: see `StepBatch`.
        sampled_tokens: the same as a list.
    """

    def __init__(self, num_drafts: Int32Array) -> None:
        self.rounds = Rounds(num_drafts)
        self.counts = num_drafts + np.int32(1)
        self.cu_seqlens_q = np.zeros(len(num_drafts) + 1, np.int32)
        np.cumsum(self.counts, out=self.cu_seqlens_q[1:])
        firsts = self.cu_seqlens_q[:-1]
        self.rows: Indices = np.repeat(np.arange(len(num_drafts)), self.counts)
        self.offsets = np.arange(self.cu_seqlens_q[-1], dtype=np.int32) - firsts[self.rows]
        self.logits_indices = firsts[self.rounds.order] + self.rounds.depths
        self.sampled_tokens: list[int] = self.logits_indices.tolist()
        for array in (self.counts, self.cu_seqlens_q, self.offsets, self.logits_indices):
            array.flags.writeable = False  # they are shared


@lru_cache(maxsize=MAX_LAYOUTS)
def find_layout(num_drafts: tuple[int, ...]) -> DraftLayout:
    """The same object again for the same numbers."""
    return DraftLayout(np.array(num_drafts, np.int32))
