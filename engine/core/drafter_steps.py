"""Batches of the steps that a draft model takes before one of the served model."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.contract.block_digests import first_row
from tessera.engine.contract.sampling_row import SamplingRows
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.step_batch import Int32Array, SamplingBatch, StepBatch, TableUpdates
from tessera.engine.speculation.draft_keys import DraftKeys, DraftLimits
from tessera.engine.speculation.model_drafts import is_on_device


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


class DrafterSteps:
    """Gathers the batches, and notes what the draft model will have read."""

    def __init__(self, keys: DraftKeys, limits: DraftLimits, slots: SlotArrays, block_size: int) -> None:
        self._keys = keys
        self._limits = limits
        self._slots = slots
        self._block_size = block_size

    def gather(self, sequences: list[Sequence], updates: TableUpdates | None) -> tuple[tuple[StepBatch, ...], bool]:
        """The steps before one of `sequences`, of which the first reads what it has not read of their texts, and
        whether that is more than newest tokens. `updates`: of the block tables, since the last step."""
        readers = [sequence for sequence in sequences if sequence.num_drafter_chunk]
        if not readers:
            return (), False
        limits = self._limits
        samples = [is_on_device(sequence.draft) for sequence in readers]
        drafting = [sequence for sequence, is_sampled in zip(readers, samples, strict=True) if is_sampled]
        counts = np.array([sequence.num_drafter_chunk for sequence in readers], np.int32)
        starts = np.array([sequence.num_drafter_tokens for sequence in readers], np.int32)
        input_ids = array("i")
        for sequence in readers:
            first = sequence.num_drafter_tokens
            stop = first + sequence.num_drafter_chunk
            input_ids += sequence.token_ids[first:stop]
            self._keys.note_computed(sequence.block_table, first, stop)
            sequence.num_drafter_tokens, sequence.num_drafter_chunk = stop, 0
        if not limits.rereads:
            for sequence in drafting:
                sequence.num_drafter_tokens += len(sequence.draft) - 1
        first_step = self._first_step(readers, starts, counts, np.frombuffer(input_ids, np.int32), np.array(samples))
        first_step.table_updates = updates
        return (first_step, *self._later_steps(drafting)), bool((counts > limits.caught_up).any())

    def _first_step(
        self,
        sequences: list[Sequence],
        starts: Int32Array,
        counts: Int32Array,
        input_ids: Int32Array,
        samples: np.ndarray[Any, np.dtype[np.bool_]],
    ) -> StepBatch:
        """`counts` tokens of each sequence from `starts` on; those that `samples` says are sampled, as their step will
        do it but for adjustments."""
        slots = np.array([sequence.slot for sequence in sequences], np.int32)
        cu_seqlens_q = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        firsts, shift = starts - np.int32(self._limits.shift), np.int32(self._limits.shift)
        positions = np.arange(len(input_ids), dtype=np.int32) + np.repeat(firsts - cu_seqlens_q[:-1], counts)
        context_lens = firsts + counts
        return StepBatch(
            input_ids=input_ids,
            positions=positions + np.repeat(self._rope_rows(sequences), counts),
            slot_mapping=self._places(np.repeat(slots, counts), positions),
            table_rows=slots,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            logits_indices=(cu_seqlens_q[1:] - np.int32(1))[samples],
            sampling=self._sampling(slots[samples], context_lens[samples] + shift),
        )

    def _later_steps(self, drafting: list[Sequence]) -> list[StepBatch]:
        """Each reads the tokens that the one before has chosen, of those drafts that go on."""
        num_drafts = np.array([len(sequence.draft) for sequence in drafting], np.int32)
        most = int(num_drafts.max(initial=0))
        if most < 2:
            return []
        shift = self._limits.shift
        slots = np.array([sequence.slot for sequence in drafting], np.int32)
        lengths = np.array([sequence.num_tokens for sequence in drafting], np.int32)
        positions = lengths + np.arange(-shift, most - 1 - shift, dtype=np.int32)[:, None]
        rows = positions + self._rope_rows(drafting)
        places = self._places(slots, positions)
        context_lens = positions + np.int32(1)
        sampling = self._sampling(slots, lengths)
        steps: list[StepBatch] = []
        for number in range(1, most):
            arrays = slots, rows[number - 1], places[number - 1], context_lens[number - 1]
            chosen = sampling.rows.copy()
            chosen["position"] = lengths + np.int32(number)
            if (num_drafts <= number).any():
                goes_on = num_drafts > number
                arrays = tuple([each[goes_on] for each in arrays])  # type: ignore[assignment]
                chosen = chosen[goes_on]
            own_slots, own_rows, own_places, own_lens = arrays
            numbers = self._slots.numbers[: len(chosen) + 1]
            steps.append(
                StepBatch(
                    input_ids=-1 - own_slots,
                    positions=own_rows,
                    slot_mapping=own_places,
                    table_rows=own_slots,
                    cu_seqlens_q=numbers,
                    context_lens=own_lens,
                    logits_indices=numbers[:-1],
                    sampling=SamplingBatch(chosen, sampling.flags),
                )
            )
        return steps

    def _places(self, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Of tokens in the KV cache; positions beyond a table, which no draft has, get any."""
        tables, block_size = self._slots.block_tables, np.int32(self._block_size)
        columns = np.minimum(positions // block_size, np.int32(tables.shape[1] - 1))
        blocks: Int32Array = tables[slots, columns]
        return blocks * block_size + positions % block_size

    def _rope_rows(self, sequences: list[Sequence]) -> Int32Array:
        short_len = self._limits.short_rope_len
        return np.array([first_row(short_len, sequence.max_num_tokens) for sequence in sequences], np.int32)

    def _sampling(self, slots: Int32Array, positions: Int32Array) -> SamplingBatch:
        rows = self._slots.rows.take(slots)
        rows["position"] = positions
        return SamplingBatch.of(rows)
