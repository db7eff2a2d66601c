"""Who computes how many tokens in the next step.

There are no prefill or decode phases: every sequence has `num_computed_tokens`, and each step spends
one token budget to let sequences catch up with their tokens. A decode catches up by one, a prompt by
what the budget allows, a preempted sequence starts over. A sequence that has caught up is sampled.

The sequences are served in order of (priority, arrival); only those that wait for a prefix that an earlier
one is computing let others go first. When blocks run out the last running one
gives up its own, so the first always progresses and with it, in the end, everyone.
"""

from __future__ import annotations

import contextlib
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from engine.batch import Int32Array, SamplingBatch, SlotInit, StepBatch, TokenMask
from engine.block_manager import BlockManager
from engine.messages import FinishReason, SchedulerStats
from engine.prefixes_in_progress import PrefixesInProgress
from engine.prompt_logprobs import gather_prompt_rows
from engine.sequence import Sequence, SequenceStatus

_in_order = attrgetter("order")


@dataclass
class ScheduledStep:
    """One step's work: who, how much, and the same as arrays for the model runner.

    Attributes:
        sequences: the rows of `batch`; `num_scheduled_tokens` goes with them.
        sampled: those that catch up with their tokens, in the order of the sampled rows.
        filled: those that fill a block, with their number of computed tokens after the step.
        admitted: those that enter with this step; also in `sequences`.
        preempted: those that lost their blocks and wait again.
        prompt_rows: whose the batch's prompt rows are, and how many of each.
    """

    batch: StepBatch
    sequences: list[Sequence]
    num_scheduled_tokens: list[int]
    sampled: list[Sequence] = field(default_factory=list)
    filled: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    prompt_rows: list[tuple[Sequence, int]] = field(default_factory=list)


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
        self._prefixes = PrefixesInProgress(block_manager.block_size)
        self._admission_is_blocked = False

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
        """The next step, or None if there is no work.

        The scheduled tokens count as computed from here on: blocks may be taken for what follows them
        before the step has run, but only `publish` lets others share them.
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
        return step

    def publish(self, step: ScheduledStep) -> None:
        """Let the prefix cache have the blocks that an executed step has filled."""
        for sequence, num_computed_tokens in step.filled:
            if sequence.is_running:
                first = sequence.num_published_blocks
                self.block_manager.publish(sequence, num_computed_tokens)
                self._slots.write_blocks(sequence, first)
                if self._prefixes.publish(sequence, first, num_computed_tokens // self.block_manager.block_size):
                    self._admission_is_blocked = False

    def record_sampled(self, step: ScheduledStep, token_ids: Int32Array) -> None:
        """Keep each sampled sequence's newest token as its next step's input."""
        self._slots.last_token_ids[step.batch.sampling.slots] = token_ids

    def _schedule_running(self, sequences: list[Sequence], counts: list[int], preempted: list[Sequence]) -> int:
        """-> the budget that is left; if any, every running sequence has caught up."""
        budget = self.max_num_batched_tokens
        block_size = self.block_manager.block_size
        running = self.running
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            num_computed = sequence.num_computed_tokens
            count = len(sequence.token_ids) - num_computed
            if count > 1:
                # A long prompt leaves a token to each sequence behind it, so that those keep decoding.
                count = min(count, budget - (len(running) - index))
            num_tokens = num_computed + count
            fits = num_tokens <= len(sequence.block_table) * block_size
            if not fits and not self._allocate(sequence, num_tokens, preempted):
                break
            sequences.append(sequence)
            counts.append(count)
            budget -= count
        return budget

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
        """Start waiting sequences in order, while their whole present length finds room."""
        admitted: list[Sequence] = []
        if self._admission_is_blocked:
            return admitted
        blocks = self.block_manager
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[index]
            if self._prefixes.waits(sequence):
                index += 1
                continue
            shared_blocks = blocks.match_prefix(sequence)
            if self._prefixes.await_longest(sequence, len(shared_blocks)):
                index += 1
                continue
            # A spare block for each running sequence: without it the next step would preempt again.
            if not blocks.fits(sequence.num_tokens, shared_blocks, spare=len(self.running)):
                self._admission_is_blocked = True
                break
            del self.waiting[index]
            blocks.share(sequence, shared_blocks)
            self._prefixes.begin(sequence)
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
        self._prefixes.leave(sequence)
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
        self.last_token_ids = np.zeros(num_slots, np.int32)
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
        self.last_token_ids[slot] = sequence.token_ids[-1]
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
        self._block_tables[sequence.slot, : len(sequence.block_table)] = 0
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def write_blocks(self, sequence: Sequence, first: int) -> None:
        """Copy the sequence's block table from block `first` on."""
        table = sequence.block_table
        self._block_tables[sequence.slot, first : len(table)] = table[first:]

    def gather(self, sequences: list[Sequence], num_scheduled: list[int], admitted: list[Sequence]) -> ScheduledStep:
        num_rows = len(sequences)
        slots = np.fromiter([sequence.slot for sequence in sequences], np.int32, num_rows)
        starts = np.fromiter([sequence.num_computed_tokens for sequence in sequences], np.int32, num_rows)
        num_tokens = np.fromiter([len(sequence.token_ids) for sequence in sequences], np.int32, num_rows)
        counts = np.fromiter(num_scheduled, np.int32, num_rows)
        context_lens = starts + counts
        cu_seqlens_q = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        has_caught_up = context_lens == num_tokens
        sampled_rows = np.flatnonzero(has_caught_up)

        rows = np.repeat(np.arange(num_rows, dtype=np.int32), counts)
        positions = np.arange(len(rows), dtype=np.int32) + (starts - cu_seqlens_q[:-1])[rows]
        blocks = self._block_tables[slots[rows], positions // self._block_size]
        table_width = -(-int(context_lens.max()) // self._block_size)

        input_ids = np.empty(len(rows), np.int32)
        input_ids[cu_seqlens_q[1:] - 1] = self.last_token_ids[slots]
        for row in np.flatnonzero((counts > 1) | ~has_caught_up).tolist():
            chunk = sequences[row].token_ids[starts[row] : context_lens[row]]
            input_ids[cu_seqlens_q[row] : cu_seqlens_q[row + 1]] = chunk

        sampled = [sequences[row] for row in sampled_rows.tolist()]
        in_prompt = np.flatnonzero(starts < self._num_prompt_tokens[slots] - 1).tolist()
        prompt_rows, askers = gather_prompt_rows(in_prompt, sequences, num_scheduled, cu_seqlens_q)
        filled_rows = np.flatnonzero(context_lens // self._block_size > starts // self._block_size)
        batch = StepBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=blocks * np.int32(self._block_size) + positions % self._block_size,
            block_tables=self._block_tables[slots, :table_width],
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            logits_indices=cu_seqlens_q[1:][sampled_rows] - 1,
            sampling=self._gather_sampling(slots[sampled_rows], context_lens[sampled_rows]),
            slot_inits=[_slot_init(sequence) for sequence in admitted],
            token_mask=self._gather_masks(slots[sampled_rows], sampled),
            prompt_rows=prompt_rows,
        )
        return ScheduledStep(
            batch=batch,
            sequences=sequences,
            num_scheduled_tokens=num_scheduled,
            sampled=sampled,
            filled=[(sequences[row], int(context_lens[row])) for row in filled_rows.tolist()],
            admitted=admitted,
            prompt_rows=askers,
        )

    def _gather_masks(self, slots: Int32Array, sampled: list[Sequence]) -> TokenMask | None:
        rows = np.flatnonzero(self._is_constrained[slots])
        constraints = [sampled[row].constraint for row in rows.tolist()]
        words = [constraint.mask for constraint in constraints if constraint is not None]
        return TokenMask(rows.astype(np.int32), np.stack(words)) if words else None

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
