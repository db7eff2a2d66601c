"""The continuous-batching scheduler: which sequences compute how many tokens in the next step.

There are no prefill or decode phases: every sequence has `num_computed_tokens`, and each step spends
one token budget to let sequences catch up with their tokens. A decode catches up by one, a prompt by
what the budget allows, a preempted sequence starts over. A sequence that has caught up is sampled.

Sequences are served in order of (priority, arrival), except that one that waits for a prefix which an earlier one is
computing lets others pass. When blocks run out, the last running sequence is preempted, so the first always
progresses, and in the end all do.
"""

from __future__ import annotations

import contextlib
from bisect import insort
from operator import attrgetter

from tessera.engine.contract.messages import FinishReason, SchedulerStats
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.prefill_budget import PrefillBudget
from tessera.engine.core.prefixes_in_progress import PrefixesInProgress
from tessera.engine.core.sequence import Sequence, SequenceStatus
from tessera.engine.core.slot_table import ScheduledStep, SlotTable

_in_order = attrgetter("order")

BACKLOG_SEQS = 256  # waiting sequences that are counted before each step


class Scheduler:
    """Queues of sequences over one block manager.

    A sequence that is added must fit on its own: `num_tokens` up to the longest it can become is at most
    `max_context`, and at most what all blocks together hold.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_context: int,
        full_sizes: tuple[int, ...] = (),
    ) -> None:
        """`full_sizes`: see `PrefillBudget`."""
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = SlotTable(max_num_seqs, block_manager.num_blocks_for(max_context), block_manager.block_size)
        self._prefixes = PrefixesInProgress(block_manager)
        self._admission_is_blocked = False
        self._prefill_budget = PrefillBudget(full_sizes)

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

    def enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_in_order)
        self._admission_is_blocked = False

    def record_duration(self, step: ScheduledStep, seconds: float) -> None:
        """An executed step took `seconds`."""
        self._prefill_budget.record_step(sum(count for count in step.num_scheduled_tokens if count > 1), seconds)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence; the blocks of one that failed leave the prefix cache."""
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

    def index_prefixes(self) -> None:
        """Index prefixes in progress now, ideally while the last step runs, rather than in the next call."""
        self._prefixes.index_running()

    def publish(self, step: ScheduledStep) -> None:
        """Publish the blocks that an executed step has filled."""
        for sequence, num_computed_tokens in step.filled:
            if sequence.is_running:
                first = sequence.num_published_blocks
                before = sequence.block_table[first:]
                self.block_manager.publish(sequence, num_computed_tokens)
                if sequence.block_table[first:] != before:  # the same tokens were in other blocks already
                    self._slots.write_blocks(sequence, first)
                if self._prefixes.publish(sequence, first, num_computed_tokens // self.block_manager.block_size):
                    self._admission_is_blocked = False

    def _schedule_running(self, sequences: list[Sequence], counts: list[int], preempted: list[Sequence]) -> int:
        """-> the budget that is left; if any, every running sequence has caught up."""
        budget = self.max_num_batched_tokens
        prompt_budget = self._prompt_token_budget()
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

    def _prompt_token_budget(self) -> int:
        """Prompt tokens that the next step may take."""
        most, num_decodes = self.max_num_batched_tokens, 0
        num_prompts = min(len(self.waiting), self.max_num_seqs - len(self.running))
        backlog = sum(sequence.num_tokens for sequence in self.waiting[:BACKLOG_SEQS])
        for sequence in self.running:
            missing = sequence.num_tokens + sequence.num_pending_tokens - sequence.num_computed_tokens
            if missing > 1:
                backlog += missing
                num_prompts += 1
            else:
                num_decodes += 1
        if backlog and num_decodes > num_prompts:
            return self._prefill_budget.tokens_beside_decodes(backlog, most, num_decodes, num_prompts)
        # With more prompts than decodes, a long step serves more sequences than it delays.
        return (
            self._prefill_budget.tokens_for_many_prompts(most, num_decodes) if num_prompts + num_decodes > 1 else most
        )

    def _allocate(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Get blocks for `num_tokens` tokens, preempting the last running; False if that was `sequence` itself."""
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
        """Start waiting sequences in order, while there are blocks for all their tokens."""
        admitted: list[Sequence] = []
        if self._admission_is_blocked:
            return admitted
        blocks = self.block_manager
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[index]
            if sequence.num_pending_tokens:
                break  # preempted while its newest token is on the way
            if self._prefixes.is_waiting(sequence):
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
            self._prefixes.add_running(sequence)
            sequence.num_computed_tokens = len(shared_blocks) * blocks.block_size
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
                sequence.num_cached_tokens = sequence.num_computed_tokens
            count = min(sequence.num_uncomputed_tokens, budget)
            enough = blocks.allocate(sequence, sequence.num_computed_tokens + count)
            assert enough, "a sequence that fits has its blocks"
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_in_order)
            self._slots.assign_slot(sequence)
            sequences.append(sequence)
            counts.append(count)
            admitted.append(sequence)
            budget -= count
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue; its tokens stay, and its blocks may still be cached."""
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        insort(self.waiting, sequence, key=_in_order)

    def _leave(self, sequence: Sequence, *, withdraw: bool = False) -> None:
        self.running.remove(sequence)
        self._slots.release_slot(sequence)
        self._prefixes.remove_running(sequence)
        self.block_manager.release(sequence, withdraw=withdraw)
        self._admission_is_blocked = False
