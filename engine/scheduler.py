"""Who computes how many tokens in the next step.

There are no prefill or decode phases: every sequence has `num_computed_tokens`, and each step spends
one token budget to let sequences catch up with their tokens. A decode catches up by one, a prompt by
what the budget allows, a preempted sequence starts over. A sequence that has caught up is sampled.

The sequences are served in order of (priority, arrival). When blocks run out the last running one
gives up its own, so the first always progresses and with it, in the end, everyone.
"""

from __future__ import annotations

import contextlib
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from engine.batch import Int32Array, SamplingBatch, SlotInit, StepBatch, TableUpdates
from engine.block_manager import BlockManager
from engine.messages import FinishReason, SchedulerStats
from engine.sequence import Sequence, SequenceStatus
from engine.step_pace import StepPace

_in_order = attrgetter("order")

BACKLOG_SEQS = 256  # waiting sequences that are counted before each step


@dataclass
class ScheduledStep:
    """One step's work: who, how much, and the same as arrays for the model runner.

    Attributes:
        sequences: the rows of `batch`; `num_scheduled_tokens` goes with them.
        sampled: those that catch up with their tokens, in the order of the sampled rows.
        filled: those that fill a block, with their number of computed tokens after the step.
        admitted: those that enter with this step; also in `sequences`.
        constrained: the sampled rows that wait for a mask, with their sequences.
        preempted: those that lost their blocks and wait again.
    """

    batch: StepBatch
    sequences: list[Sequence]
    num_scheduled_tokens: list[int]
    sampled: list[Sequence] = field(default_factory=list)
    filled: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    constrained: list[tuple[int, Sequence]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Queues of sequences over one block manager.

    A sequence that is added must fit on its own: `num_tokens` up to the longest it can become is at most
    `max_context`, and at most what all blocks together hold.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_context: int
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = SlotTable(max_num_seqs, block_manager.num_blocks_for(max_context), block_manager.block_size)
        self._admission_is_blocked = False
        self._pace = StepPace()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> SchedulerStats:
        blocks = self.block_manager
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=len(blocks.free_blocks),
            num_cached_blocks=len(blocks.cached_blocks),
            num_used_blocks=blocks.num_used_blocks,
        )

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_in_order)
        self._admission_is_blocked = False

    def record_pace(self, step: ScheduledStep, seconds: float) -> None:
        """An executed step took `seconds`."""
        self._pace.record(sum(count for count in step.num_scheduled_tokens if count > 1), seconds)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out; one that failed leaves nothing behind in the prefix cache."""
        if sequence.is_running:
            self._leave(sequence, withdraw=reason == "error")
        else:
            with contextlib.suppress(ValueError):  # its grammar is still being compiled
                self.waiting.remove(sequence)
            self._admission_is_blocked = False
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute.

        It may follow steps whose tokens are not known yet. The scheduled tokens count as computed from
        here on, and what they sample as pending: blocks may be taken for what follows before the step has
        run, but only `publish` lets others share them.
        """
        sequences: list[Sequence] = []
        counts: list[int] = []
        preempted: list[Sequence] = []
        budget = self._schedule_running(sequences, counts, preempted)
        admitted = self._admit_waiting(sequences, counts, budget, now)
        if not sequences:
            return None
        step = self._slots.gather(sequences, counts, admitted)
        step.preempted = preempted
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed_tokens += count
        for sequence in step.sampled:
            sequence.num_pending_tokens += 1
        return step

    def publish(self, step: ScheduledStep) -> None:
        """Let the prefix cache have the blocks that an executed step has filled."""
        for sequence, num_computed_tokens in step.filled:
            if sequence.is_running:
                first = sequence.num_published_blocks
                before = sequence.block_table[first:]
                self.block_manager.publish(sequence, num_computed_tokens)
                if sequence.block_table[first:] != before:  # the same tokens were in other blocks already
                    self._slots.write_blocks(sequence, first)

    def _schedule_running(self, sequences: list[Sequence], counts: list[int], preempted: list[Sequence]) -> int:
        """-> the budget that is left; if any, every running sequence has caught up."""
        budget = self.max_num_batched_tokens
        prompt_budget = self._prompt_budget()
        block_size = self.block_manager.block_size
        running = self.running
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            num_computed = sequence.num_computed_tokens
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
            if num_tokens >= sequence.max_num_tokens and sequence.num_pending_tokens:
                continue  # its last token is on the way
            count = num_tokens - num_computed
            if count > 1:
                # A long prompt leaves a token to each sequence behind it, so that those keep decoding.
                count = min(count, budget - (len(running) - index), prompt_budget)
                if count < 1:
                    continue
                prompt_budget -= count
            num_tokens = num_computed + count
            fits = num_tokens <= len(sequence.block_table) * block_size
            if not fits and not self._allocate(sequence, num_tokens, preempted):
                break
            sequences.append(sequence)
            counts.append(count)
            budget -= count
        return min(budget, prompt_budget)

    def _prompt_budget(self) -> int:
        """Tokens of prompts that the next step may take."""
        most, num_decodes = self.max_num_batched_tokens, 0
        backlog = sum(sequence.num_tokens for sequence in self.waiting[:BACKLOG_SEQS])
        for sequence in self.running:
            missing = sequence.num_tokens + sequence.num_pending_tokens - sequence.num_computed_tokens
            if missing > 1:
                backlog += missing
            else:
                num_decodes += 1
        return self._pace.prompt_tokens(backlog, most) if num_decodes and backlog else most

    def _allocate(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Get blocks for `num_tokens` tokens from whoever comes last; False if that is `sequence` itself."""
        first = len(sequence.block_table)
        while not self.block_manager.allocate(sequence, num_tokens):
            assert len(self.running) > 1, f"sequence {sequence.request_id} does not fit on its own"
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        self._slots.write_blocks(sequence, first)
        return True

    def _admit_waiting(self, sequences: list[Sequence], counts: list[int], budget: int, now: float) -> list[Sequence]:
        """Start waiting sequences, strictly in order, while their whole present length finds room."""
        admitted: list[Sequence] = []
        if self._admission_is_blocked:
            return admitted
        blocks = self.block_manager
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.num_pending_tokens:
                break  # preempted while its newest token is on the way
            shared_blocks = blocks.match_prefix(sequence)
            # A spare block for each running sequence: without it the next step would preempt again.
            if not blocks.fits(sequence.num_tokens, shared_blocks, spare=len(self.running)):
                self._admission_is_blocked = True
                break
            del self.waiting[0]
            blocks.share(sequence, shared_blocks)
            sequence.num_computed_tokens = len(shared_blocks) * blocks.block_size
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
                sequence.num_cached_tokens = sequence.num_computed_tokens
            count = min(sequence.num_uncomputed_tokens, budget)
            enough = blocks.allocate(sequence, sequence.num_computed_tokens + count)
            assert enough, "a sequence that fits has its blocks"
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_in_order)
            self._slots.enter(sequence)
            sequences.append(sequence)
            counts.append(count)
            admitted.append(sequence)
            budget -= count
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue with all tokens kept; their blocks may yet be found again."""
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        insort(self.waiting, sequence, key=_in_order)

    def _leave(self, sequence: Sequence, *, withdraw: bool = False) -> None:
        self.running.remove(sequence)
        self._slots.leave(sequence)
        self.block_manager.release(sequence, withdraw=withdraw)
        self._admission_is_blocked = False


class SlotTable:
    """Running sequences' state as arrays over slots, from which a step's batch is gathered.

    A step of 256 decodes costs a few indexing operations instead of 256 visits to each parameter.
    """

    def __init__(self, num_slots: int, max_num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._block_tables = np.zeros((num_slots, max_num_blocks), np.int32)
        self._changed: dict[int, int] = {}  # slots whose table the runner does not know from this column on
        self._seeds = np.zeros(num_slots, np.uint64)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.zeros(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._repetition_penalty = np.zeros(num_slots, np.float32)
        self._presence_penalty = np.zeros(num_slots, np.float32)
        self._frequency_penalty = np.zeros(num_slots, np.float32)
        self._min_tokens = np.zeros(num_slots, np.int32)
        self._num_logprobs = np.zeros(num_slots, np.int32)
        self._num_prompt_tokens = np.zeros(num_slots, np.int32)
        self._is_adjusted = np.zeros(num_slots, np.bool_)
        self._is_filtered = np.zeros(num_slots, np.bool_)
        self._is_constrained = np.zeros(num_slots, np.bool_)

    def enter(self, sequence: Sequence) -> None:
        slot = sequence.slot = self._free_slots.pop()
        params = sequence.params
        self._seeds[slot] = params.seed
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._repetition_penalty[slot] = params.repetition_penalty
        self._presence_penalty[slot] = params.presence_penalty
        self._frequency_penalty[slot] = params.frequency_penalty
        self._min_tokens[slot] = params.min_tokens
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self._is_adjusted[slot] = params.has_penalties or bool(params.logit_bias)
        self._is_filtered[slot] = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self._is_constrained[slot] = sequence.constraint is not None
        self.write_blocks(sequence, 0)

    def leave(self, sequence: Sequence) -> None:
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
        num_rows = len(sequences)
        slots = np.fromiter([sequence.slot for sequence in sequences], np.int32, num_rows)
        starts = np.fromiter([sequence.num_computed_tokens for sequence in sequences], np.int32, num_rows)
        num_tokens = np.fromiter(
            [len(sequence.token_ids) + sequence.num_pending_tokens for sequence in sequences], np.int32, num_rows
        )
        counts = np.fromiter(num_scheduled, np.int32, num_rows)
        context_lens = starts + counts
        cu_seqlens_q = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        has_caught_up = context_lens == num_tokens
        sampled_rows = np.flatnonzero(has_caught_up)

        rows = np.repeat(np.arange(num_rows, dtype=np.int32), counts)
        positions = np.arange(len(rows), dtype=np.int32) + (starts - cu_seqlens_q[:-1])[rows]
        blocks = self._block_tables[slots[rows], positions // self._block_size]

        input_ids = np.empty(len(rows), np.int32)
        input_ids[cu_seqlens_q[1:] - 1] = [
            -1 - sequence.slot if sequence.num_pending_tokens else sequence.token_ids[-1] for sequence in sequences
        ]
        for row in np.flatnonzero((counts > 1) | ~has_caught_up).tolist():
            chunk = sequences[row].token_ids[starts[row] : context_lens[row]]
            input_ids[cu_seqlens_q[row] : cu_seqlens_q[row + 1]] = chunk

        sampled = [sequences[row] for row in sampled_rows.tolist()]
        constrained_rows = np.flatnonzero(self._is_constrained[slots[sampled_rows]]).tolist()
        filled_rows = np.flatnonzero(context_lens // self._block_size > starts // self._block_size)
        batch = StepBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=blocks * np.int32(self._block_size) + positions % self._block_size,
            table_rows=slots,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            logits_indices=cu_seqlens_q[1:][sampled_rows] - 1,
            sampling=self._gather_sampling(slots[sampled_rows], context_lens[sampled_rows]),
            slot_inits=[_slot_init(sequence) for sequence in admitted],
            table_updates=self._take_updates(sequences),
            is_constrained=bool(constrained_rows),
        )
        return ScheduledStep(
            batch=batch,
            sequences=sequences,
            num_scheduled_tokens=num_scheduled,
            sampled=sampled,
            filled=[(sequences[row], int(context_lens[row])) for row in filled_rows.tolist()],
            admitted=admitted,
            constrained=[(row, sampled[row]) for row in constrained_rows],
        )

    def _take_updates(self, sequences: list[Sequence]) -> TableUpdates | None:
        """What the block tables of `sequences` have become since the runner was told."""
        if not self._changed:
            return None
        pieces = [
            (sequence.slot, first, len(sequence.block_table))
            for sequence in sequences
            if (first := self._changed.pop(sequence.slot, None)) is not None
        ]
        if not pieces:
            return None
        rows = np.repeat([slot for slot, _, _ in pieces], [stop - first for _, first, stop in pieces])
        columns = np.concatenate([np.arange(first, stop) for _, first, stop in pieces])
        blocks = self._block_tables[rows, columns]
        return TableUpdates(rows.astype(np.int32), columns.astype(np.int32), blocks)

    def _gather_sampling(self, slots: Int32Array, positions: Int32Array) -> SamplingBatch:
        num_output_tokens = positions - self._num_prompt_tokens[slots]
        min_tokens = self._min_tokens[slots]
        return SamplingBatch(
            slots=slots,
            num_output_tokens=num_output_tokens,
            positions=positions,
            seeds=self._seeds[slots],
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            repetition_penalty=self._repetition_penalty[slots],
            presence_penalty=self._presence_penalty[slots],
            frequency_penalty=self._frequency_penalty[slots],
            min_tokens=min_tokens,
            num_logprobs=self._num_logprobs[slots],
            needs_adjustment=bool((self._is_adjusted[slots] | (num_output_tokens < min_tokens)).any()),
            needs_filter=bool(self._is_filtered[slots].any()),
        )


def _slot_init(sequence: Sequence) -> SlotInit:
    params = sequence.params
    return SlotInit(
        slot=sequence.slot,
        params=params,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        suppressed_token_ids=tuple(sorted(sequence.stop_token_ids)) if params.min_tokens else (),
    )
