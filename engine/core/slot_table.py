"""Running sequences' state in arrays, from which a step's batch is gathered."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tessera.engine.contract.block_digests import first_row
from tessera.engine.contract.sampling_params import RowFlag
from tessera.engine.contract.sampling_row import ROW_BYTES, SAMPLING_ROW, SamplingRows, row_values
from tessera.engine.core.prompt_logprobs import gather_prompt_rows
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.step_batch import (
    Int32Array,
    SamplingBatch,
    SlotInit,
    StepBatch,
    TableUpdates,
    draft_reference,
)
from tessera.engine.speculation.draft_keys import DraftKeys, DraftLimits
from tessera.engine.speculation.draft_layout import DraftLayout, Rounds, find_layout
from tessera.engine.speculation.model_drafts import is_on_device
from tessera.engine.speculation.verification import VerifiedDraft

BeginDraft: TypeAlias = Callable[[tuple[StepBatch, ...]], None]
FEW_TOKENS = 64  # of a draft model's first step


@dataclass
class ScheduledStep:
    """One step's sequences, their token counts, and the same as arrays for the model runner.

    Attributes:
        sequences: the rows of `batch`; `num_scheduled_tokens` goes with them.
        sampled: those that catch up with their tokens, in the order of the first rows that are sampled.
        verified: the drafts.
        reads_texts: the draft model reads more before it than newest tokens.
        filled: those that fill a block, with their number of computed tokens after the step, drafts included.
        admitted: those that start with this step; also in `sequences`.
        constrained: the sampled rows that wait for a mask, with their sequences and how many draft tokens are before.
        preempted: those that lost their blocks and wait again.
        prompt_rows: the sequences of the batch's prompt rows, with their number of rows.
    """

    batch: StepBatch
    sequences: list[Sequence]
    num_scheduled_tokens: list[int]
    sampled: list[Sequence] = field(default_factory=list)
    filled: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    constrained: list[tuple[int, Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    prompt_rows: list[tuple[Sequence, int]] = field(default_factory=list)
    verified: list[VerifiedDraft] = field(default_factory=list)
    reads_texts: bool = False

    @property
    def num_draft_tokens(self) -> int:
        return sum([len(draft.rows) for draft in self.verified])

    @property
    def is_decode(self) -> bool:
        """Each of its sequences goes on by a token, and by its draft."""
        return not self.admitted and sum(self.num_scheduled_tokens) == len(self.sampled) + self.num_draft_tokens

    def accepted_rows(self, num_accepted: dict[int, int]) -> Iterator[tuple[list[Sequence], list[int]]]:
        """Sequences with the rows of the tokens that they get behind draft tokens, those of each in turn.

        `num_accepted`: draft tokens of each verified draft, by its index.
        """
        depth = 1
        while counted := [draft for draft in self.verified if num_accepted[draft.index] >= depth]:
            yield [self.sampled[draft.index] for draft in counted], [draft.rows[depth - 1] for draft in counted]
            depth += 1


class VerifiedRows(NamedTuple):
    """The parts of verify-only steps that are reused while sequences and draft lengths stay the same.

    Attributes:
        key, slots: [R] of the sequences.
        layout: of the drafts.
        row_bytes: [S] sampling parameters of the sampled rows, but for their positions.
        sampled_slots: [S] of the sampled rows.
        flags: RowFlags of all of them together.
    """

    key: tuple[int, ...]
    layout: DraftLayout
    slots: Int32Array
    row_bytes: np.ndarray[Any, np.dtype[np.void]]
    sampled_slots: Int32Array
    flags: int

    def sampling_at(self, positions: Int32Array) -> SamplingBatch:
        """With the positions [S] of the tokens to be chosen."""
        rows: SamplingRows = self.row_bytes.copy().view(SAMPLING_ROW)  # as rows it takes a hundred times as long
        rows["position"] = positions
        if self.flags & RowFlag.SUPPRESSED:
            return SamplingBatch.of(rows)
        return SamplingBatch(rows, self.flags, self.sampled_slots)


class SlotTable:
    """Running sequences' state as arrays over slots, from which a step's batch is gathered.

    A step of 256 decodes costs a few indexing operations instead of 256 visits to each parameter.

    `batch_invariant`: a row's number of tokens says by which kernels they are computed, so tokens before a sequence's
    `prefill_end` are rows of at least two, and the others rows of one. Only in a step that verifies drafts and does no
    more a row has all of its sequence's.
    """

    def __init__(
        self,
        num_slots: int,
        max_num_blocks: int,
        block_size: int,
        *,
        batch_invariant: bool = False,
        draft_keys: DraftKeys | None = None,
        draft_limits: DraftLimits | None = None,
        begin_draft: BeginDraft | None = None,
    ) -> None:
        """`draft_limits`: of a draft model, whose `draft_keys` are known; `begin_draft` submits its steps before one
        that is not gathered yet: first the first of them, then all."""
        self._batch_invariant = batch_invariant
        self._num_slots = num_slots
        self._block_size = block_size
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._block_tables = np.zeros((num_slots, max_num_blocks), np.int32)
        self._changed: dict[int, int] = {}  # slots whose table the runner does not know from this column on
        self._rows = np.zeros(num_slots, SAMPLING_ROW)
        self._numbers = np.arange(num_slots + 1, dtype=np.int32)
        self._rope_rows = np.zeros(num_slots, np.int32)
        self._has_rope_rows = False  # any but 0, until now
        self._adapter_slots = np.full(num_slots, -1, np.int32)
        self._has_adapters = False  # any, until now
        self._drafter_steps: DrafterSteps | None = None
        if draft_keys is not None and draft_limits is not None:
            arrays = SlotArrays(self._block_tables, self._rows, self._numbers)
            self._drafter_steps = DrafterSteps(draft_keys, draft_limits, arrays, block_size)
        self._begin_draft = begin_draft
        self._verified_rows: VerifiedRows | None = None  # of the last step that verified drafts alone
        self._stale: list[Sequence] = []  # whose sampling state counts draft tokens that were rejected

    def assign_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot = self._free_slots.pop()
        self._verified_rows = None
        self._rows[slot] = row_values(
            sequence.params,
            slot=slot,
            num_prompt_tokens=sequence.num_prompt_tokens,
            constrained=_needs_mask(sequence),
        )
        self._rope_rows[slot] = sequence.rope_row
        self._has_rope_rows = self._has_rope_rows or sequence.rope_row > 0
        self._adapter_slots[slot] = sequence.adapter_slot
        self._has_adapters = self._has_adapters or sequence.adapter_slot >= 0
        self.write_blocks(sequence, 0)

    def note_constraint(self, sequence: Sequence) -> None:
        """Constrain the sequence's row, or no longer, as its constraint says now."""
        self._verified_rows = None
        flags = self._rows["flags"]
        flag = np.uint32(RowFlag.CONSTRAINED)
        flags[sequence.slot] &= ~flag
        if _needs_mask(sequence):
            flags[sequence.slot] |= flag

    def note_rejected(self, sequence: Sequence) -> None:
        """Draft tokens of the sequence were rejected: what penalties count must be made anew."""
        if self._rows["flags"].item(sequence.slot) & RowFlag.PENALIZED:
            self._stale.append(sequence)

    def release_slot(self, sequence: Sequence) -> None:
        self._changed.pop(sequence.slot, None)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def write_blocks(self, sequence: Sequence, first: int) -> None:
        """Copy the sequence's block table from block `first` on."""
        table, slot = sequence.block_table, sequence.slot
        if first < len(table):
            self._block_tables[slot, first : len(table)] = table[first:]
            self._changed[slot] = min(first, self._changed.get(slot, first))

    def gather(self, sequences: list[Sequence], num_scheduled: list[int], admitted: list[Sequence]) -> ScheduledStep:
        """The next step: these sequences with that many tokens each; `admitted` are the new ones among them."""
        updates = self._take_updates(sequences)
        drafting, reads_texts = self._gather_drafting(sequences, updates)
        drafts = [len(sequence.draft) for sequence in sequences]
        if not admitted and any(drafts) and all(map(_goes_on, sequences)):
            step = self._gather_verified(sequences, num_scheduled, drafts)
        else:
            step = self._gather_others(sequences, num_scheduled, admitted)
        step.batch.table_updates = updates
        step.batch.drafting, step.reads_texts = drafting, reads_texts
        return self._renew_stale(step)

    def _gather_drafting(
        self, sequences: list[Sequence], updates: TableUpdates | None
    ) -> tuple[tuple[StepBatch, ...], bool]:
        """The draft model's steps before the one of `sequences`, and whether more than newest tokens are read in them.

        The device waits for the first, and may soon wait for the others.
        """
        if self._drafter_steps is None:
            return (), False
        first, readers = self._drafter_steps.gather_first(sequences, updates)
        if first is None:
            return (), False
        if self._begin_draft is not None:
            self._begin_draft((first,))
        steps = (first, *self._drafter_steps.gather_later(readers.drafting))
        if self._begin_draft is not None:
            self._begin_draft(steps)
        return steps, readers.read_texts

    def _gather_others(
        self, sequences: list[Sequence], num_scheduled: list[int], admitted: list[Sequence]
    ) -> ScheduledStep:
        """A step that does not verify drafts alone."""
        slots = np.array([sequence.slot for sequence in sequences], np.int32)
        starts = np.array([sequence.num_computed_tokens for sequence in sequences], np.int32)
        num_tokens = np.array(
            [len(sequence.token_ids) + sequence.num_pending_tokens for sequence in sequences], np.int32
        )
        newest = np.array([_newest_id(sequence) for sequence in sequences], np.int32)
        if not admitted and (num_tokens == starts + 1).all():
            return self._gather_decodes(sequences, num_scheduled, slots, starts, newest)
        step = self._gather_chunks(sequences, num_scheduled, slots, starts, num_tokens, newest)
        step.admitted = admitted
        step.batch.slot_inits = [_slot_init(sequence) for sequence in admitted]
        return step

    def _renew_stale(self, step: ScheduledStep) -> ScheduledStep:
        if self._stale:
            step.batch.slot_inits += [_slot_init(each) for each in self._stale if each.is_running]
            self._stale.clear()
        return step

    def _gather_chunks(
        self,
        sequences: list[Sequence],
        num_scheduled: list[int],
        slots: Int32Array,
        starts: Int32Array,
        num_tokens: Int32Array,
        newest: Int32Array,
    ) -> ScheduledStep:
        """A step with chunks of prompts or drafts, any number of tokens a sequence."""
        counts = np.array(num_scheduled, np.int32)
        context_lens = starts + counts
        repeats: np.ndarray[Any, np.dtype[np.bool_]] | None = None
        if self._batch_invariant:
            # One token before prefill_end takes the token in front of it along, which is not stored again. Position 0
            # has none, and needs none: it sees one key, whose value it gets from any kernel.
            prefill_ends = self._rows["num_prompt_tokens"][slots] - 1
            repeats = (np.minimum(context_lens, prefill_ends) - starts == 1) & (starts > 0)
            starts = starts - repeats
            counts = counts + repeats
        cu_seqlens_q = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        drafts = [len(sequence.draft) for sequence in sequences]
        num_drafts = np.array(drafts if any(drafts) else 0, np.int32)  # of each, or of all
        has_caught_up = context_lens == num_tokens + num_drafts
        sampled_rows = np.flatnonzero(has_caught_up)
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens_q[:-1], counts)
        # As one index into the flat table, which takes half as long as two.
        first_places = slots * np.int32(self._block_tables.shape[1])
        blocks = self._block_tables.take(np.repeat(first_places, counts) + positions // self._block_size)

        input_ids = np.empty(len(positions), np.int32)
        input_ids[cu_seqlens_q[1:] - 1] = newest
        for row in np.flatnonzero((counts > 1) | ~has_caught_up).tolist():
            chunk = sequences[row].token_ids[starts[row] : context_lens[row]]
            if drafts[row]:
                chunk += array("i", self._draft_ids(sequences[row]))
            input_ids[cu_seqlens_q[row] : cu_seqlens_q[row + 1]] = chunk

        sampled = [sequences[row] for row in sampled_rows.tolist()]
        rounds = Rounds(num_drafts[sampled_rows] if num_drafts.ndim else np.zeros(len(sampled), np.int32))
        of_rows = sampled_rows[rounds.order] if rounds.sizes else sampled_rows
        sampling = self._gather_sampling(slots[of_rows], (context_lens - num_drafts)[of_rows] + rounds.depths)
        constrained_rows = sampling.rows_with(RowFlag.CONSTRAINED).tolist()
        in_prompt = np.flatnonzero(starts < self._rows["num_prompt_tokens"][slots] - 1).tolist()
        firsts = cu_seqlens_q[:-1] if repeats is None else cu_seqlens_q[:-1] + repeats
        prompt_rows, askers = gather_prompt_rows(in_prompt, sequences, num_scheduled, firsts)
        filled_rows = np.flatnonzero(context_lens // self._block_size > starts // self._block_size)
        filled = [(sequences[row], int(context_lens[row])) for row in filled_rows.tolist()]
        slot_mapping = blocks * np.int32(self._block_size) + positions % self._block_size
        if repeats is not None:
            slot_mapping[cu_seqlens_q[:-1][repeats]] = -1
        logits_indices = (cu_seqlens_q[1:] - 1 - num_drafts)[of_rows] + rounds.depths
        table_rows = slots
        # Where all tokens are sampled they are newest ones with drafts, which attention computes as if apart.
        if self._batch_invariant and len(of_rows) < len(positions):
            begins = positions >= np.repeat(prefill_ends, counts)
            begins[cu_seqlens_q[:-1]] = True
            first_tokens = np.flatnonzero(begins).astype(np.int32)
            table_rows = np.repeat(slots, counts)[first_tokens]
            cu_seqlens_q = np.append(first_tokens, np.int32(len(positions)))
            context_lens = positions[cu_seqlens_q[1:] - 1] + 1
        batch = StepBatch(
            input_ids=input_ids,
            positions=positions + np.repeat(self._rope_rows[slots], counts) if self._has_rope_rows else positions,
            slot_mapping=slot_mapping,
            table_rows=table_rows,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            logits_indices=logits_indices,
            sampling=sampling,
            is_constrained=bool(constrained_rows),
            prompt_rows=prompt_rows,
            adapter_slots=self._gather_adapters(slots, counts) if self._has_adapters else None,
            rounds=rounds.sizes,
        )
        return ScheduledStep(
            batch=batch,
            sequences=sequences,
            num_scheduled_tokens=num_scheduled,
            sampled=sampled,
            filled=filled,
            constrained=[(row, sampled[rounds.order[row]], int(rounds.depths[row])) for row in constrained_rows],
            prompt_rows=askers,
            verified=_verified(rounds, sampled),
        )

    def _draft_ids(self, sequence: Sequence) -> list[int]:
        draft, slot = sequence.draft, sequence.slot
        if not is_on_device(draft):
            return draft
        return [draft_reference(number, slot, self._num_slots) for number in range(len(draft))]

    def _take_updates(self, sequences: list[Sequence]) -> TableUpdates | None:
        """Changes of the block tables of `sequences` that the runner does not have yet."""
        if not self._changed:
            return None
        pieces = [
            (sequence.slot, first, len(sequence.block_table))
            for sequence in sequences
            if (first := self._changed.pop(sequence.slot, None)) is not None
        ]
        if not pieces:
            return None
        if len(pieces) == 1:
            ((slot, first, stop),) = pieces
            columns = np.arange(first, stop, dtype=np.int32)
            rows = np.full(len(columns), slot, np.int32)
            return TableUpdates(rows, columns, self._block_tables[slot, first:stop].copy())
        slots: list[int] = []
        places: list[int] = []
        for slot, first, stop in pieces:  # mostly a block each, for which arrays would take longer
            slots += [slot] * (stop - first)
            places += range(first, stop)
        rows, columns = np.array(slots, np.int32), np.array(places, np.int32)
        return TableUpdates(rows, columns, self._block_tables[rows, columns])

    def _gather_decodes(
        self, sequences: list[Sequence], counts: list[int], slots: Int32Array, starts: Int32Array, newest: Int32Array
    ) -> ScheduledStep:
        """The most common step: one token a sequence, all sampled."""
        context_lens = starts + 1
        rows = self._numbers[: len(sequences) + 1]
        offsets = starts % self._block_size
        blocks = self._block_tables[slots, starts // self._block_size]
        sampling = self._gather_sampling(slots, context_lens)
        constrained_rows = sampling.rows_with(RowFlag.CONSTRAINED).tolist()
        filled_rows = np.flatnonzero(offsets == self._block_size - 1).tolist()
        batch = StepBatch(
            input_ids=newest,
            positions=starts + self._rope_rows[slots] if self._has_rope_rows else starts,
            slot_mapping=blocks * self._block_size + offsets,
            table_rows=slots,
            cu_seqlens_q=rows,
            context_lens=context_lens,
            logits_indices=rows[:-1],
            sampling=sampling,
            is_constrained=bool(constrained_rows),
            adapter_slots=self._gather_adapters(slots, None) if self._has_adapters else None,
        )
        return ScheduledStep(
            batch=batch,
            sequences=sequences,
            num_scheduled_tokens=counts,
            sampled=sequences,
            filled=[(sequences[row], int(context_lens[row])) for row in filled_rows],
            constrained=[(row, sequences[row], 0) for row in constrained_rows],
        )

    def _gather_verified(self, sequences: list[Sequence], counts: list[int], num_drafts: list[int]) -> ScheduledStep:
        """A token and a draft, if any, of each sequence, all sampled.

        The device waits for this step. So what depends on the drafts' lengths alone is looked up, and the rest is made
        of lists: each operation on an array takes as long as a dozen tokens.
        """
        layout, size = find_layout(tuple(num_drafts)), self._block_size
        verified = self._find_verified_rows(tuple([sequence.slot for sequence in sequences]), layout)
        rounds, slots = layout.rounds, verified.slots
        input_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        context_lens: list[int] = []
        filled: list[tuple[Sequence, int]] = []
        for sequence, num_draft_tokens in zip(sequences, num_drafts, strict=True):
            first = sequence.num_computed_tokens
            stop = first + num_draft_tokens + 1
            input_ids.append(_newest_id(sequence))
            input_ids += self._draft_ids(sequence)
            positions += range(first, stop)
            slot_mapping += places_of(sequence.block_table, first, stop, size)
            context_lens.append(stop)
            if stop // size > first // size:
                filled.append((sequence, stop))
        num_tokens = len(input_ids)
        seen = [positions[token] + 1 for token in layout.sampled_tokens]
        arrays = np.array([*input_ids, *positions, *slot_mapping, *seen, *context_lens], np.int32)
        pieces = [arrays[first : first + num_tokens] for first in range(0, len(arrays), num_tokens)]
        sampling = verified.sampling_at(pieces[3])
        constrained_rows = sampling.rows_with(RowFlag.CONSTRAINED).tolist()
        batch = StepBatch(
            input_ids=pieces[0],
            positions=pieces[1] + self._rope_rows[slots].take(layout.rows) if self._has_rope_rows else pieces[1],
            slot_mapping=pieces[2],
            table_rows=slots,
            cu_seqlens_q=layout.cu_seqlens_q,
            context_lens=pieces[4],
            logits_indices=layout.logits_indices,
            sampling=sampling,
            is_constrained=bool(constrained_rows),
            adapter_slots=self._gather_adapters(slots, layout.counts) if self._has_adapters else None,
            rounds=rounds.sizes,
        )
        return ScheduledStep(
            batch=batch,
            sequences=sequences,
            num_scheduled_tokens=counts,
            sampled=sequences,
            filled=filled,
            constrained=[(row, sequences[rounds.order[row]], int(rounds.depths[row])) for row in constrained_rows],
            verified=_verified(rounds, sequences),
        )

    def _find_verified_rows(self, slots: tuple[int, ...], layout: DraftLayout) -> VerifiedRows:
        """Those of the last such step where slots and layout are the same."""
        found = self._verified_rows
        if found is None or found.key != slots or found.layout is not layout:
            array = np.array(slots, np.int32)
            sampled = array.take(layout.rounds.order)
            rows = self._rows.take(sampled)
            flags = int(np.bitwise_or.reduce(rows["flags"]))
            array.flags.writeable = sampled.flags.writeable = False  # they are shared
            found = self._verified_rows = VerifiedRows(slots, layout, array, rows.view(ROW_BYTES), sampled, flags)
        return found

    def _gather_adapters(self, slots: Int32Array, counts: Int32Array | None) -> Int32Array | None:
        """Of each token; None if none has an adapter. `counts`: tokens of each sequence, if not one."""
        found = self._adapter_slots[slots]
        if (found < 0).all():
            return None
        return found if counts is None else np.repeat(found, counts)

    def _gather_sampling(self, slots: Int32Array, positions: Int32Array) -> SamplingBatch:
        rows = self._rows.take(slots)  # a tenth of the time of self._rows[slots]
        rows["position"] = positions
        return SamplingBatch.of(rows)


class SlotArrays(NamedTuple):
    """What a `SlotTable` knows of its N slots.

    Attributes:
        block_tables: [N, blocks].
        rows: [N] sampling parameters.
        numbers: [N + 1] 0, 1, ... N.
    """

    block_tables: Int32Array
    rows: SamplingRows
    numbers: Int32Array


def places_of(block_table: list[int], first: int, stop: int, block_size: int) -> list[int]:
    """In the KV cache, of a sequence's tokens first..stop - 1."""
    places: list[int] = []
    for block in range(first // block_size, (stop - 1) // block_size + 1):
        shift = (block_table[block] - block) * block_size
        places += range(max(first, block * block_size) + shift, min(stop, (block + 1) * block_size) + shift)
    return places


class DraftReaders(NamedTuple):
    """The sequences of a draft model's first step.

    Attributes:
        drafting: those that it samples.
        read_texts: any of them reads more than newest tokens.
    """

    drafting: list[Sequence]
    read_texts: bool


NO_READERS = DraftReaders([], False)


class DrafterSteps:
    """Gathers the batches of a draft model's steps, and notes what the draft model will have read."""

    def __init__(self, keys: DraftKeys, limits: DraftLimits, slots: SlotArrays, block_size: int) -> None:
        self._keys = keys
        self._limits = limits
        self._slots = slots
        self._block_size = block_size

    def gather_first(
        self, sequences: list[Sequence], updates: TableUpdates | None
    ) -> tuple[StepBatch | None, DraftReaders]:
        """The first step before one of `sequences`, which reads what the draft model has not read of their texts; None
        where that is nothing. `updates`: of the block tables, since the last step."""
        readers = [sequence for sequence in sequences if sequence.num_drafter_chunk]
        if not readers:
            return None, NO_READERS
        limits = self._limits
        samples = [is_on_device(sequence.draft) for sequence in readers]
        drafting = [sequence for sequence, is_sampled in zip(readers, samples, strict=True) if is_sampled]
        counts = [sequence.num_drafter_chunk for sequence in readers]
        gather = self._first_of_few if sum(counts) <= FEW_TOKENS else self._first_of_many
        first = gather(readers, counts, samples)
        first.table_updates = updates
        if limits.rereads:
            first.next_places = np.array([self._next_place(sequence) for sequence in drafting], np.int32)
        for sequence, count in zip(readers, counts, strict=True):
            begin = sequence.num_drafter_tokens
            sequence.num_drafter_tokens, sequence.num_drafter_chunk = begin + count, 0
            self._keys.note_computed(sequence.block_table, begin, begin + count)
        if not limits.rereads:
            for sequence in drafting:
                sequence.num_drafter_tokens += len(sequence.draft) - 1
        return first, DraftReaders(drafting, max(counts) > limits.caught_up)

    def _next_place(self, sequence: Sequence) -> int:
        """Of the token of the second step; -1 where the sequence has none."""
        if len(sequence.draft) < 2:
            return -1
        block, offset = divmod(len(sequence.token_ids) - self._limits.shift, self._block_size)
        return sequence.block_table[block] * self._block_size + offset

    def _first_of_few(self, sequences: list[Sequence], counts: list[int], samples: list[bool]) -> StepBatch:
        """As `_first_of_many`, of lists: each operation on an array takes as long as a dozen tokens."""
        shift, size = self._limits.shift, self._block_size
        input_ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        ends = [0]
        for sequence, count in zip(sequences, counts, strict=True):
            first = sequence.num_drafter_tokens
            input_ids += sequence.token_ids[first : first + count]
            first -= shift
            positions += range(first, first + count)
            places += places_of(sequence.block_table, first, first + count, size)
            slots.append(sequence.slot)
            context_lens.append(first + count)
            ends.append(len(positions))
        chosen = [number for number, is_sampled in enumerate(samples) if is_sampled]
        num_tokens, num_seqs = len(input_ids), len(sequences)
        rows = [*slots, *context_lens, *ends, *[ends[1 + number] - 1 for number in chosen]]
        seen = [context_lens[number] + shift for number in chosen]
        arrays = np.array([*input_ids, *positions, *places, *rows, *seen], np.int32)
        of_rows = arrays[3 * num_tokens :]
        own_slots, lasts = of_rows[:num_seqs], of_rows[3 * num_seqs + 1 : 3 * num_seqs + 1 + len(chosen)]
        sampled_slots = own_slots if len(chosen) == num_seqs else own_slots.take(chosen)
        rope_rows = self._rope_rows(sequences)
        own_positions = arrays[num_tokens : 2 * num_tokens]
        return StepBatch(
            input_ids=arrays[:num_tokens],
            positions=own_positions if rope_rows is None else own_positions + rope_rows.repeat(counts),
            slot_mapping=arrays[2 * num_tokens : 3 * num_tokens],
            table_rows=own_slots,
            cu_seqlens_q=of_rows[2 * num_seqs : 3 * num_seqs + 1],
            context_lens=of_rows[num_seqs : 2 * num_seqs],
            logits_indices=lasts,
            sampling=self._sampling(sampled_slots, of_rows[len(of_rows) - len(chosen) :]),
        )

    def _first_of_many(self, sequences: list[Sequence], counts: list[int], samples: list[bool]) -> StepBatch:
        """`counts` tokens of each sequence from those on that it has read; those that `samples` says are sampled, as
        their step will do it but for adjustments."""
        input_ids = array("i")
        for sequence, count in zip(sequences, counts, strict=True):
            input_ids += sequence.token_ids[sequence.num_drafter_tokens : sequence.num_drafter_tokens + count]
        starts = [sequence.num_drafter_tokens for sequence in sequences]
        slots = np.array([sequence.slot for sequence in sequences], np.int32)
        shift = np.int32(self._limits.shift)
        firsts, sizes = np.array(starts, np.int32) - shift, np.array(counts, np.int32)
        cu_seqlens_q = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(sizes, out=cu_seqlens_q[1:])
        rows = np.arange(len(sequences)).repeat(sizes)
        positions = np.arange(len(input_ids), dtype=np.int32) + (firsts - cu_seqlens_q[:-1]).take(rows)
        context_lens = firsts + sizes
        lasts, sampled_slots, seen = cu_seqlens_q[1:] - np.int32(1), slots, context_lens + shift
        if not all(samples):
            chosen = np.flatnonzero(samples)
            lasts, sampled_slots, seen = lasts.take(chosen), slots.take(chosen), seen.take(chosen)
        rope_rows = self._rope_rows(sequences)
        return StepBatch(
            input_ids=np.frombuffer(input_ids, np.int32),
            positions=positions if rope_rows is None else positions + rope_rows.take(rows),
            slot_mapping=self._places(slots.take(rows), positions),
            table_rows=slots,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            logits_indices=lasts,
            sampling=self._sampling(sampled_slots, seen),
        )

    def gather_later(self, drafting: list[Sequence]) -> list[StepBatch]:
        """The steps behind the first: each reads the tokens that the one before has chosen, of those drafts that go on.

        The device may have done the first step by the time they are made, so they are made together."""
        num_drafts = [len(sequence.draft) for sequence in drafting]
        most = max(num_drafts, default=0)
        if most < 2:
            return []
        count, shift = len(drafting), self._limits.shift
        slots = np.array([sequence.slot for sequence in drafting], np.int32)
        lengths = np.array([sequence.num_tokens for sequence in drafting], np.int32)
        # [steps, sequences], step by step.
        numbers, slots_of_steps = np.arange(1, most, dtype=np.int32).repeat(count), np.tile(slots, most - 1)
        seen = np.tile(lengths, most - 1) + numbers
        positions = seen - np.int32(1 + shift)
        rope_rows = self._rope_rows(drafting)
        rows = positions if rope_rows is None else positions + np.tile(rope_rows, most - 1)
        places = self._places(slots_of_steps, positions)
        sampling = self._sampling(slots_of_steps, seen)
        next_places = np.append(places[count:], np.full(count, -1, np.int32))
        pieces: list[Any] = [slice(first, first + count) for first in range(0, (most - 1) * count, count)]
        if min(num_drafts) < most:
            goes_on = np.array(num_drafts, np.int32)[None] > np.arange(1, most + 1, dtype=np.int32)[:, None]
            next_places[~goes_on[1:].ravel()] = -1
            pieces = [np.flatnonzero(goes_on[step]) + step * count for step in range(most - 1)]
        arrays = [
            -1 - slots_of_steps,
            slots_of_steps,
            rows,
            places,
            positions + np.int32(1),
            sampling.rows,
            next_places,
        ]
        steps: list[StepBatch] = []
        for piece in pieces:
            ids, own_slots, own_rows, own_places, own_lens, sampled, following = (each[piece] for each in arrays)
            numbers = self._slots.numbers[: len(ids) + 1]
            steps.append(
                StepBatch(
                    input_ids=ids,
                    positions=own_rows,
                    slot_mapping=own_places,
                    table_rows=own_slots,
                    cu_seqlens_q=numbers,
                    context_lens=own_lens,
                    logits_indices=numbers[:-1],
                    sampling=SamplingBatch(sampled, sampling.flags),
                    next_places=following,
                )
            )
        return steps

    def _places(self, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Of tokens in the KV cache; positions beyond a table, which no draft has, get any."""
        tables, block_size = self._slots.block_tables, np.int32(self._block_size)
        columns = np.minimum(positions // block_size, np.int32(tables.shape[1] - 1))
        blocks: Int32Array = tables.take(slots * np.int32(tables.shape[1]) + columns)
        return blocks * block_size + positions % block_size

    def _rope_rows(self, sequences: list[Sequence]) -> Int32Array | None:
        """None where all have row 0."""
        short_len = self._limits.short_rope_len
        if not short_len:
            return None
        return np.array([first_row(short_len, sequence.max_num_tokens) for sequence in sequences], np.int32)

    def _sampling(self, slots: Int32Array, positions: Int32Array) -> SamplingBatch:
        rows = self._slots.rows.take(slots)
        rows["position"] = positions
        return SamplingBatch.of(rows)


def _verified(rounds: Rounds, sampled: list[Sequence]) -> list[VerifiedDraft]:
    drafts: list[VerifiedDraft] = []
    for index, rows in rounds.drafted:
        sequence = sampled[index]
        tokens, slot = ([], sequence.slot) if is_on_device(sequence.draft) else (sequence.draft, -1)
        drafts.append(VerifiedDraft(index, tokens, rows, sequence.draft_source, slot))
    return drafts


def _goes_on(sequence: Sequence) -> bool:
    """Whether the step computes the sequence's newest token, and none before."""
    return len(sequence.token_ids) + sequence.num_pending_tokens == sequence.num_computed_tokens + 1


def _newest_id(sequence: Sequence) -> int:
    """Its newest token, or what stands for it while only the device knows it."""
    return -1 - sequence.slot if sequence.num_pending_tokens else sequence.token_ids[-1]


def _needs_mask(sequence: Sequence) -> bool:
    return sequence.constraint is not None and not sequence.constraint.is_idle


def _slot_init(sequence: Sequence) -> SlotInit:
    params = sequence.params
    return SlotInit(
        slot=sequence.slot,
        params=params,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        suppressed_token_ids=tuple(sorted(sequence.stop_token_ids)) if params.min_tokens else (),
    )
