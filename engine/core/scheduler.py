"""The continuous-batching scheduler: which sequences compute how many tokens in the next step.

There are no prefill or decode phases: every sequence has `num_computed_tokens`, and each step spends
one token budget to let sequences catch up with their tokens. A decode catches up by one, a prompt by
what the budget allows, a preempted sequence starts over. A sequence that has caught up is sampled. With a draft it
catches up with that as well, where there are budget and blocks for it that no other sequence needs.

Sequences of one account are served in order of (priority, arrival), except that one that waits for a prefix which an
earlier one is computing lets others pass. One whose prefix lies in host memory or on disk has its seat and blocks at
once, but runs only when the prefix has been copied back. When blocks run out, the last running sequence is preempted,
so the first always progresses, and in the end all do.

Where several accounts have work, the one that has been served least goes first, in tokens of prompts, in seats and in
blocks; see `account` for what counts, and `takeover` for when a running sequence makes way for a waiting one.
"""

from __future__ import annotations

from bisect import insort
from itertools import chain
from operator import attrgetter

from tessera.engine.adapters.seats import AdapterSeats
from tessera.engine.contract.messages import FinishReason, SchedulerStats
from tessera.engine.core.account import SCORED_PROMPT_TOKEN_COST, Accounts
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.fair_queue import FairQueue
from tessera.engine.core.prefill_budget import DecodeReads, PrefillBudget
from tessera.engine.core.prefixes_in_progress import PrefixesInProgress
from tessera.engine.core.sequence import Sequence, SequenceStatus
from tessera.engine.core.slot_table import BeginDraft, ScheduledStep, SlotTable
from tessera.engine.core.takeover import MAX_LAG, find_victim
from tessera.engine.speculation.draft_keys import DraftLimits
from tessera.engine.speculation.draft_lengths import longest_of

_in_order = attrgetter("order")
_turn = attrgetter("turn")

MAX_MATCHED_BLOCKS = 2048  # of cached prefixes in one step, beyond which no more sequences start: a few milliseconds
MAX_HASHED_BLOCKS = 2048  # of waiting sequences in one step, hashed or compared; no more are looked at: likewise
BLOCKS_OF_A_LOOK = 16  # that any look at a sequence counts as, so that 128 take the whole step's
BACKLOG_SEQS = 256  # waiting sequences that are counted before each step


class Scheduler:
    """Queues of sequences over one block manager.

    A sequence that is added must fit on its own: `num_tokens` up to the longest it can become is at most
    `max_context`, and at most what all blocks together hold.

    Attributes:
        running: in the order in which they are served; with several lanes, that of the last step.
        loading: have a seat, and wait for blocks that are copied back to the device; the first to begin is first.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_context: int,
        full_sizes: tuple[int, ...] = (),
        accounts: Accounts | None = None,
        batch_invariant: bool = False,
        adapters: AdapterSeats | None = None,
        max_drafts: int = 0,
        draft_limits: DraftLimits | None = None,
        begin_draft: BeginDraft | None = None,
        reads: DecodeReads | None = None,
    ) -> None:
        """`full_sizes`, `reads`: see `PrefillBudget`.

        `accounts`: those of the engine, where others charge them too. `batch_invariant`: sequences have a
        `prefill_end`. `max_drafts`: most draft tokens of a step. `draft_limits`: of a draft model, whose steps
        before the next one `begin_draft` submits before that is gathered.
        """
        self.block_manager = block_manager
        self.accounts = accounts if accounts is not None else Accounts()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_drafts = max_drafts
        self._draft_room = 0  # draft tokens that the step may still take
        self.waiting = FairQueue(start_allowance=max_num_batched_tokens)
        self.running: list[Sequence] = []
        self.loading: list[Sequence] = []
        self._loaded: list[Sequence] = []  # running, but in no step yet
        num_blocks = block_manager.num_blocks_for(max_context)
        self._slots = SlotTable(
            max_num_seqs,
            num_blocks,
            block_manager.block_size,
            batch_invariant=batch_invariant,
            draft_keys=block_manager.draft_keys,
            draft_limits=draft_limits,
            begin_draft=begin_draft,
        )
        self._recomputed_rows = 0  # that the step has room for
        self._num_hashed = 0  # blocks of waiting sequences, for this step
        self._prefixes = PrefixesInProgress(block_manager)
        self._admission_is_blocked = False
        self._was_shared = False
        self._prefill_budget = PrefillBudget(full_sizes, reads)
        self._adapters = adapters

    @property
    def has_unfinished(self) -> bool:
        blocks = self.block_manager
        return bool(self.running or self.waiting or self.loading or blocks.leaving or blocks.is_resetting)

    def stats(self) -> SchedulerStats:
        blocks = self.block_manager
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.loading),
            num_free_blocks=len(blocks.free_blocks),
            num_cached_blocks=len(blocks.cached_blocks),
            num_used_blocks=blocks.num_used_blocks,
        )

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence whose account is open."""
        sequence.lane = sequence.account.lane(sequence.rank)
        sequence.status = SequenceStatus.WAITING
        sequence.note_costs()
        self.waiting.enqueue(sequence)
        self._admission_is_blocked = False

    def note_constraint(self, sequence: Sequence) -> None:
        """Its constraint has become idle, or is no longer."""
        if sequence.is_running:
            self._slots.note_constraint(sequence)

    def record_duration(self, step: ScheduledStep, seconds: float) -> None:
        """An executed step took `seconds`."""
        if not step.verified and not step.reads_texts:
            scheduled = zip(step.sequences, step.num_scheduled_tokens, strict=True)
            cached = [sequence.num_computed_tokens for sequence, count in scheduled if count == 1]
            num_prompt_tokens = sum(step.num_scheduled_tokens) - len(cached)
            self._prefill_budget.record_step(num_prompt_tokens, seconds, len(cached), sum(cached))

    def record_launch(self, step: ScheduledStep, seconds: float) -> None:
        """The host took `seconds` to submit a step."""
        self._prefill_budget.record_launch(step.batch.num_tokens, seconds)

    def give_back(self, sequence: Sequence, num_rejected: int) -> None:
        """So many tokens of the sequence's draft were rejected: they are not computed, and need no blocks."""
        if sequence.is_running and num_rejected:
            sequence.num_computed_tokens -= num_rejected
            sequence.num_drafter_tokens = min(sequence.num_drafter_tokens, sequence.num_computed_tokens)
            self.block_manager.trim(sequence, sequence.num_computed_tokens)
            self._slots.note_rejected(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence; the blocks of one that failed leave the prefix cache."""
        if sequence.has_seat:
            self._leave(sequence, withdraw=reason == "error")
            sequence.account.drop_if_empty(sequence.lane)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.block_manager.drop_tail(sequence)
            sequence.account.drop_if_empty(sequence.lane)
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
        if self.block_manager.release_more():
            self._admission_is_blocked = False
        if self.block_manager.tiers is not None:
            self._finish_loads()
        is_shared = self.accounts.is_shared
        self._recomputed_rows = self.max_num_seqs
        self._num_hashed = 0
        self._prefixes.begin_step()
        self._draft_room = self._max_drafts
        self._share_draft_room()
        if is_shared:
            self._make_way(preempted)
        if is_shared or self._was_shared:
            self._sort_running()
        self._was_shared = is_shared
        budget = self._schedule_running(sequences, counts, preempted, reserves=is_shared)
        if is_shared:
            _charge_running(sequences, counts)
        admitted = self._note_loaded(sequences, now) if self._loaded else []
        admitted += self._admit_waiting(sequences, counts, budget, preempted, now, is_shared=is_shared)
        if is_shared and not sequences and self.running:
            # What was kept for the next in line was not taken: it loads blocks, or was preempted just now.
            self._schedule_running(sequences, counts, preempted, reserves=False)
            _charge_running(sequences, counts)
            admitted = self._note_loaded(sequences, now)
        if self.block_manager.tiers is not None:
            self.block_manager.tiers.submit()
        if not sequences:
            return None
        step = self._slots.gather(sequences, counts, admitted)
        step.preempted = preempted
        if self._adapters is not None:
            step.batch.adapter_loads = self._adapters.take_loads()
        for sequence, count in step.prompt_rows:
            sequence.account.charge(count * SCORED_PROMPT_TOKEN_COST)
        if is_shared:
            for sequence in step.sampled:
                account = sequence.account
                account.service += sequence.sampled_cost / account.weight
        else:  # there is nothing to compare with yet, so the total will do
            sequences[0].account.charge(step.batch.num_tokens + len(step.sampled))
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
                num_computed_tokens = min(num_computed_tokens, sequence.num_computed_tokens, sequence.num_tokens)
                if num_computed_tokens // self.block_manager.block_size <= first:
                    continue  # a draft has filled the block, and was rejected
                before = sequence.block_table[first:]
                self.block_manager.publish(sequence, num_computed_tokens)
                if sequence.block_table[first:] != before:  # the same tokens were in other blocks already
                    self._slots.write_blocks(sequence, first)
                if self._prefixes.publish(sequence, first, num_computed_tokens // self.block_manager.block_size):
                    self._admission_is_blocked = False

    def _schedule_running(
        self, sequences: list[Sequence], counts: list[int], preempted: list[Sequence], *, reserves: bool
    ) -> int:
        """-> the budget that is left; if any, every running sequence has caught up.

        With `reserves`, prompts of lanes behind the next waiting sequence's leave it what it can take.
        """
        budget = self.max_num_batched_tokens
        prompt_budget = budget
        if self.waiting or reserves or any(sequence.num_tokens_to_schedule > 1 for sequence in self.running):
            prompt_budget = self._prompt_token_budget()
        block_size = self.block_manager.block_size
        running = self.running
        reserved, before = self._reserve(prompt_budget) if reserves else (0, None)
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
                if before is not None and sequence.lane.turn > before:
                    count = min(count, prompt_budget - reserved)
                if count < 1:
                    continue
                count = self._limit_rows(sequence, count)
                prompt_budget -= count
            elif sequence.draft:
                count += self._limit_draft(sequence, budget - (len(running) - index) - count)
            num_tokens = num_computed + count
            fits = num_tokens <= len(sequence.block_table) * block_size
            if not fits and not self._allocate(sequence, num_tokens, preempted):
                break
            sequences.append(sequence)
            counts.append(count)
            budget -= count
        return min(budget, prompt_budget)

    def _reserve(self, prompt_budget: int) -> tuple[int, tuple[int, float] | None]:
        """Prompt tokens to keep for the next waiting sequence, if it can start, and the turn of its lane.

        Prompts of lanes behind it must leave them.
        """
        upcoming = self._next_ready() if self._has_seat else None
        if upcoming is None or not self._has_room(upcoming):
            return 0, None
        return min(upcoming.num_tokens, prompt_budget), self.waiting.turn(upcoming.lane)

    def _next_ready(self) -> Sequence | None:
        """The first waiting sequence that waits for nothing but room; None too where too many come before it."""
        if self._adapters is not None:
            self._adapters.begin_pass()
        for sequence in self.waiting.candidates():
            if self._num_hashed >= MAX_HASHED_BLOCKS:
                break
            if sequence.num_pending_tokens or self._prefixes.is_waiting(sequence):
                continue
            if self._adapters is not None and not self._adapters.can_run(sequence):
                continue
            if not self._match(sequence)[1]:
                return sequence
        return None

    def _match(self, sequence: Sequence) -> tuple[list[int], bool]:
        """The cached blocks of a waiting sequence's prefix, and whether it is to wait: for more of them, or for the
        next step, as a step looks at so many blocks."""
        blocks = self.block_manager
        num_known, num_matched = len(sequence.block_digests), len(sequence.matched)
        room = max(MAX_HASHED_BLOCKS - self._num_hashed, 1)
        shared_blocks: list[int] = []
        is_early = True
        if blocks.match_some(sequence, room):
            shared_blocks = sequence.matched_blocks
            room -= len(sequence.block_digests) - num_known
            is_early = self._prefixes.await_longest(sequence, len(shared_blocks), max(room, 0))
        num_new = max(len(sequence.block_digests) - num_known, len(sequence.matched) - num_matched)
        self._num_hashed += BLOCKS_OF_A_LOOK + num_new
        return shared_blocks, is_early

    def _sort_running(self) -> None:
        """Put the lane of the account that was served least first."""
        lanes = [lane for account in self.accounts.active.values() for lane in account.lanes.values() if lane.running]
        self.running[:] = chain.from_iterable([lane.running for lane in sorted(lanes, key=_turn)])
        if self.loading:
            self.running[:] = [sequence for sequence in self.running if sequence.is_running]

    def _make_way(self, preempted: list[Sequence]) -> None:
        """Preempt what must make way for the next waiting sequence."""
        head = self._next_ready()
        while head is not None and not self._has_room(head):
            if self.block_manager.leaving:
                return  # there will be more room without it
            needed = self.block_manager.num_blocks_for(head.num_tokens)
            needs_seat = not self._has_seat
            victim = find_victim(head, self.accounts, 0 if needs_seat else needed, self.max_num_batched_tokens)
            if victim is None:
                return
            self._preempt(victim)
            victim.displaced_by = head.account
            preempted.append(victim)

    def _has_room(self, sequence: Sequence) -> bool:
        """A seat is free, and blocks for all of the sequence's tokens."""
        if not self._has_seat:
            return False
        shared_blocks = self.block_manager.match_prefix(sequence)
        return self.block_manager.fits(sequence.num_tokens, shared_blocks, spare=len(self.running) + len(self.loading))

    def _prompt_token_budget(self) -> int:
        """Prompt tokens that the next step may take."""
        most = self._prompt_tokens_for_all()
        if self.accounts.is_shared and (lagging := self._lagging_decodes()):
            num_cached = sum([sequence.num_computed_tokens for sequence in lagging])
            most = min(most, self._prefill_budget.tokens_beside_lagging(most, len(lagging), num_cached))
        return most

    def _lagging_decodes(self) -> list[Sequence]:
        """Those of accounts that lag behind each account with prompts."""
        active = self.accounts.active.values()
        least = min(account.service for account in active) + MAX_LAG
        if all(account.service <= least for account in active):
            return []
        prompting = {account for account in active if account.num_waiting}
        decoding: list[Sequence] = []
        for sequence in self.running:
            if sequence.num_tokens_to_schedule > 1:
                prompting.add(sequence.account)
            else:
                decoding.append(sequence)
        if not prompting:
            return []
        limit = min(account.service for account in prompting) - MAX_LAG
        return [sequence for sequence in decoding if sequence.account.service < limit]

    def _prompt_tokens_for_all(self) -> int:
        """The same without regard to whose prompts they are."""
        most, num_decodes, num_cached = self.max_num_batched_tokens, 0, 0
        num_prompts = min(len(self.waiting), self.max_num_seqs - len(self.running))
        waiting = [len(sequence.token_ids) for sequence in self.waiting.some(BACKLOG_SEQS)]
        backlog, num_counted = sum(waiting), len(waiting)
        for sequence in self.running:
            missing = sequence.num_tokens_to_schedule
            if missing > 1:
                backlog += missing
                num_prompts += 1
                num_counted += 1
            else:
                num_decodes += 1
                num_cached += sequence.num_computed_tokens
        prompt_len = backlog / max(num_counted, 1)
        if backlog and num_decodes > num_prompts:
            return self._prefill_budget.tokens_beside_decodes(
                backlog, most, num_decodes, num_prompts, prompt_len, num_cached
            )
        # With more prompts than decodes, a long step serves more sequences than it delays.
        if num_prompts + num_decodes > 1:
            return self._prefill_budget.tokens_for_many_prompts(most, num_decodes, num_prompts, prompt_len, num_cached)
        return most

    def _allocate(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Get blocks for `num_tokens` tokens, preempting the last running; False if that was `sequence` itself."""
        first = len(sequence.block_table)
        while not self.block_manager.allocate(sequence, num_tokens):
            alone = len(self.running) == 1 and not self.loading
            assert not alone, f"sequence {sequence.request_id} does not fit on its own"
            victim = self.loading[-1] if self.loading else self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        self._slots.write_blocks(sequence, first)
        return True

    def _admit_waiting(
        self,
        sequences: list[Sequence],
        counts: list[int],
        budget: int,
        preempted: list[Sequence],
        now: float,
        *,
        is_shared: bool,
    ) -> list[Sequence]:
        """Start waiting sequences in order, while there are blocks for all their tokens."""
        admitted: list[Sequence] = []
        if not self.waiting or (self._admission_is_blocked and not is_shared):
            return admitted
        blocks = self.block_manager
        candidates = self.waiting.candidates()
        num_matched = 0
        if self._adapters is not None:
            self._adapters.begin_pass()
        while budget > 0 and self._has_seat:
            if num_matched >= MAX_MATCHED_BLOCKS or self._num_hashed >= MAX_HASHED_BLOCKS:
                break
            sequence = next(candidates, None)
            if sequence is None:
                break
            if sequence.num_pending_tokens or sequence in preempted:  # a step that it was in is still running
                if is_shared:
                    continue
                break
            if self._prefixes.is_waiting(sequence):
                continue
            if self._adapters is not None and not self._adapters.can_run(sequence):
                continue
            shared_blocks, is_early = self._match(sequence)
            num_matched += len(shared_blocks)
            if is_early:
                continue
            # A spare block for each running sequence: without it the next step would preempt again.
            if not blocks.fits(sequence.num_tokens, shared_blocks, spare=len(self.running) + len(self.loading)):
                self._admission_is_blocked = True
                break
            self.waiting.admit(sequence)
            if self._adapters is not None:
                self._adapters.take(sequence)
            blocks.share(sequence, shared_blocks)
            sequence.num_computed_tokens = len(shared_blocks) * blocks.block_size
            is_loading = blocks.start_load(sequence) and not self._finish_at_once(sequence)
            num_matched += len(sequence.block_table) - len(shared_blocks)
            self._prefixes.add_running(sequence)
            if sequence.displaced_by is not None:
                again = max(sequence.num_charged_tokens - sequence.num_computed_tokens, 0)
                self.accounts.charge_late(sequence.displaced_by, again)
                sequence.displaced_by = None
            if is_loading:
                sequence.status = SequenceStatus.LOADING
                self.loading.append(sequence)
                insort(sequence.lane.running, sequence, key=_in_order)
                continue
            sequence.note_start(now)
            count = self._limit_rows(sequence, min(sequence.num_uncomputed_tokens, budget))
            enough = blocks.allocate(sequence, sequence.num_computed_tokens + count)
            assert enough, "a sequence that fits has its blocks"
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_in_order)
            insort(sequence.lane.running, sequence, key=_in_order)
            self._slots.assign_slot(sequence)
            sequences.append(sequence)
            counts.append(count)
            admitted.append(sequence)
            budget -= count
            if is_shared:
                _charge(sequence, count)
        return admitted

    @property
    def _has_seat(self) -> bool:
        return len(self.running) + len(self.loading) < self.max_num_seqs

    def _finish_at_once(self, sequence: Sequence) -> bool:
        """Finish a load that took no time."""
        if sequence.load is None or not sequence.load.is_done:
            return False
        self.block_manager.finish_load(sequence)
        return True

    def _finish_loads(self) -> None:
        """Let sequences run whose blocks have come."""
        tiers = self.block_manager.tiers
        assert tiers is not None
        tiers.poll(before_step=bool(self.running))
        for sequence in [each for each in self.loading if each.load is not None and each.load.is_done]:
            first = self.block_manager.finish_load(sequence)
            self.loading.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_in_order)
            self._slots.assign_slot(sequence)
            self._loaded.append(sequence)
            if self._prefixes.publish(sequence, first, sequence.num_published_blocks):
                self._admission_is_blocked = False

    def _note_loaded(self, scheduled: list[Sequence], now: float) -> list[Sequence]:
        """-> the sequences that take their first step since they were loaded."""
        started = [sequence for sequence in self._loaded if sequence in scheduled]
        for sequence in started:
            self._loaded.remove(sequence)
            sequence.note_start(now)
        return started

    def _share_draft_room(self) -> None:
        """Where drafts are more than a step takes, cut the longest: the first tokens of each are the likeliest."""
        lengths = [len(sequence.draft) for sequence in self.running]
        if sum(lengths) > self._max_drafts:
            longest = longest_of(lengths, self._max_drafts)
            for sequence in self.running:
                del sequence.draft[longest:]

    def _limit_draft(self, sequence: Sequence, budget: int) -> int:
        """Cut a draft to the budget, and to blocks that are spare; -> its number of tokens."""
        blocks = self.block_manager
        length = len(sequence.draft)
        count = max(min(length, budget, self._draft_room), 0)
        room = len(sequence.block_table) * blocks.block_size - len(sequence.token_ids)
        if count > room:
            spare = max(blocks.num_available_blocks - len(self.running) - len(self.loading), 0)
            count = max(min(count, room + spare * blocks.block_size), 0)
        if count < length:
            del sequence.draft[count:]
        self._draft_room -= count
        return count

    def _limit_rows(self, sequence: Sequence, count: int) -> int:
        """As many of a sequence's next `count` tokens as the step has rows for, at least 1.

        Tokens from `prefill_end` on are a row each. After a preemption there may be many.
        """
        if sequence.prefill_end is None:
            return count
        num_computed = sequence.num_computed_tokens
        before = max(sequence.prefill_end - num_computed, 0)
        extra = min(max(count - before - 1, 0), self._recomputed_rows)
        self._recomputed_rows -= extra
        return min(count, before + 1 + extra)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running or loading sequence back to the queue; its tokens stay, and its blocks may still be cached."""
        self.block_manager.save_tail(sequence)
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.waiting.enqueue(sequence)

    def _leave(self, sequence: Sequence, *, withdraw: bool = False) -> None:
        sequence.draft = []
        sequence.lane.running.remove(sequence)
        if sequence.is_running:
            self.running.remove(sequence)
            self._slots.release_slot(sequence)
        else:
            self.loading.remove(sequence)
        if sequence in self._loaded:
            self._loaded.remove(sequence)
        self._prefixes.remove_running(sequence)
        if self._adapters is not None:
            self._adapters.give_back(sequence)
        self.block_manager.release(sequence, withdraw=withdraw)
        self._admission_is_blocked = False


def _charge_running(sequences: list[Sequence], counts: list[int]) -> None:
    """Charge each sequence's account for the tokens that the step computes for it."""
    for sequence, count in zip(sequences, counts, strict=True):
        if sequence.num_charged_tokens:
            _charge(sequence, count)
        else:
            account = sequence.account
            account.service += count / account.weight


def _charge(sequence: Sequence, count: int) -> None:
    """Charge the next `count` tokens, without those that were computed before a preemption."""
    fresh = sequence.num_computed_tokens + count - sequence.num_charged_tokens
    sequence.account.charge(min(max(fresh, 0), count))
