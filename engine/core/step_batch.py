"""One step's inputs and results as arrays: made by the scheduler, consumed by the model runner.

Plain host memory; the runner decides how it reaches the device. Letters in shapes: T tokens and
R rows of sequences, S rows of logits to sample (one a sequence, and one for each draft token).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.adapters.reader import Adapter
from tessera.engine.contract.messages import PromptScores, TokenIds, TokenLogprobs
from tessera.engine.contract.sampling_params import RowFlag, SamplingParams
from tessera.engine.contract.sampling_row import ROW_BYTES, SamplingRows

Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
UInt32Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

NO_ROWS = np.empty(0, np.int32)

# With --batch-invariant a step has at most so many rows for each sequence that there may be: one for its prompt and one
# for the token behind it; and as many rows again, of all sequences, recompute what was sampled before a preemption.
BATCH_INVARIANT_ROWS = 3


@dataclass
class SlotInit:
    """A sequence starts, or starts again, in `slot`: the runner resets the sampling state there.

    `prompt_token_ids` and `output_token_ids` are what penalties count from (after a preemption the
    output is not empty); `suppressed_token_ids` cannot be chosen before `min_tokens` outputs.
    """

    slot: int
    params: SamplingParams
    prompt_token_ids: TokenIds
    output_token_ids: list[int]
    suppressed_token_ids: tuple[int, ...]


@dataclass
class SamplingBatch:
    """Parameters of the sampled rows.

    Attributes:
        rows: [S] of dtype SAMPLING_ROW.
        flags: RowFlags of all rows together; SUPPRESSED only where a row is still short of its min_tokens.
        known_slots: [S] those of the rows, where they are an array that does not change; else None.
    """

    rows: SamplingRows
    flags: int
    known_slots: Int32Array | None = None

    @classmethod
    def of(cls, rows: SamplingRows) -> SamplingBatch:
        flags = int(np.bitwise_or.reduce(rows["flags"]))
        if flags & RowFlag.SUPPRESSED:
            num_output_tokens = rows["position"] - rows["num_prompt_tokens"]
            if not (num_output_tokens < rows["min_tokens"]).any():
                flags &= ~RowFlag.SUPPRESSED
        return cls(rows, flags)

    @property
    def row_bytes(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """[S] of dtype ROW_BYTES: the rows, to be copied."""
        return self.rows.view(ROW_BYTES)

    @property
    def slots(self) -> Int32Array:
        """[S]"""
        return self.rows["slot"] if self.known_slots is None else self.known_slots

    @property
    def positions(self) -> Int32Array:
        """[S]"""
        return self.rows["position"]

    @property
    def needs_adjustment(self) -> bool:
        """Whether any row has penalties, bias or suppressed ids in force."""
        return bool(self.flags & RowFlag.ADJUSTED)

    @property
    def needs_filter(self) -> bool:
        """Whether any row cannot choose among all tokens."""
        return bool(self.flags & RowFlag.FILTERED)

    def rows_with(self, flag: RowFlag) -> Int32Array:
        """Indices of the rows that have `flag`, ascending."""
        if not self.flags & flag:
            return NO_ROWS
        return np.flatnonzero(self.rows["flags"] & flag).astype(np.int32)


@dataclass
class TokenMask:
    """Tokens that may be chosen in the constrained rows; M of the S sampled rows."""

    rows: Int32Array  # [M] among the sampled rows
    words: UInt32Array  # [M, ceil(V / 32)] bit id % 32 of word id // 32: the token may be chosen


@dataclass
class TableUpdates:
    """Changes of block tables to apply before a step; U distinct entries."""

    rows: Int32Array  # [U] of the tables
    columns: Int32Array  # [U]
    blocks: Int32Array  # [U]

    def part(self, start: int, stop: int) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Rows, columns and blocks of the entries start..stop - 1."""
        return self.rows[start:stop], self.columns[start:stop], self.blocks[start:stop]


@dataclass
class PromptRows:
    """Prompt tokens of the step whose logits score the prompt's next token; P of them."""

    token_indices: Int32Array  # [P] among the step's tokens
    next_token_ids: Int32Array  # [P] what follows them in their prompts
    num_logprobs: Int32Array  # [P] alternatives to report


@dataclass
class StepBatch:
    """One step's work. A row's tokens are consecutive in the token arrays.

    A sequence is a row, or with a `prefill_end` several in turn, each of which sees the keys of those before it; one
    again where the step verifies drafts and does no more.
    """

    input_ids: Int32Array  # [T]; -1 - s: what was last sampled in slot s, which the host may not know yet
    positions: Int32Array  # [T] row of the position tables: index in its sequence, from the sequence's rope_row on
    slot_mapping: Int32Array  # [T] block * block_size + offset in the block
    table_rows: Int32Array  # [R] each row's place in the runner's block tables, which is its slot
    cu_seqlens_q: Int32Array  # [R + 1] first token of each row
    context_lens: Int32Array  # [R] tokens in the cache once this step's are stored
    logits_indices: Int32Array  # [S] token whose hidden state is projected and sampled
    sampling: SamplingBatch
    slot_inits: list[SlotInit] = field(default_factory=list)
    table_updates: TableUpdates | None = None
    is_constrained: bool = False  # sampling waits for a TokenMask
    prompt_rows: PromptRows | None = None
    adapter_slots: Int32Array | None = None  # [T] of each token's adapter, -1 without one; None: no token has one
    adapter_loads: list[tuple[int, Adapter]] = field(default_factory=list)  # slots to fill before the step
    # With drafts, how many of the sampled rows are behind no draft token of their sequence, behind one, and so on: the
    # rows come in this order, and each sequence has at most one in each of these rounds.
    rounds: tuple[int, ...] = ()
    # The draft model's steps before this one: each gives every sequence that it samples one draft token, and reads the
    # newest draft token of slot s as -1 - s. The step itself reads the draft of slot s by `draft_reference`.
    drafting: tuple[StepBatch, ...] = ()
    # [S] of such a step, where the draft model is given what it has itself: the places of the next of these steps, -1
    # where a sequence has no token in it.
    next_places: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def token_adapters(self) -> Int32Array:
        """[T] or, where no token has an adapter, [0]"""
        return NO_ROWS if self.adapter_slots is None else self.adapter_slots

    @property
    def chosen_adapters(self) -> Int32Array:
        """The same of the tokens that are projected and sampled: [S] or [0]."""
        return NO_ROWS if self.adapter_slots is None else self.adapter_slots[self.logits_indices]

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_sampled(self) -> int:
        return len(self.logits_indices)

    @property
    def verifies(self) -> bool:
        """Whether it verifies drafts and does no more: each row is a sequence's newest token and its draft."""
        return bool(self.rounds) and self.num_sampled == self.num_tokens


def draft_reference(number: int, slot: int, num_slots: int) -> int:
    """Token id that stands for draft token `number` of a slot, in the place after what was sampled last in each."""
    return -1 - (num_slots * (1 + number) + slot)


@dataclass
class StepResult:
    """The tokens that a step sampled.

    Attributes:
        token_ids: [S]; -1 where the row's logits were not finite, or its mask left nothing to choose.
        logprobs: per sampled row, or None where not asked for; None altogether if no row asked.
        prompt_logprobs: of the batch's prompt rows, in order.
    """

    token_ids: Int32Array
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
