"""The scheduler's decisions one by one: prompts' budgets, drafts, charges, and what is kept for others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tessera.engine.adapters.seats import AdapterSeats
from tessera.engine.contract.messages import AccountRef
from tessera.engine.core import scheduler as scheduler_module
from tessera.engine.core.account import Accounts
from tessera.engine.core.prefill_budget import PrefillBudget
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.takeover import MAX_LAG
from tests.engine.core.steps import Steps, tokens_of

HEAVY, LIGHT = AccountRef(1), AccountRef(2)


# ---- the budget of prompts ----------------------------------------------------------------------


class Asked(PrefillBudget):
    """Limits prompts to so many tokens, and keeps what it was asked and told."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self.beside_decodes: list[tuple[float, ...]] = []
        self.for_many: list[tuple[float, ...]] = []
        self.beside_lagging: list[tuple[int, int, int]] = []
        self.steps: list[tuple[int, float, int, int]] = []
        self.launches: list[tuple[int, float]] = []

    def tokens_beside_decodes(
        self,
        backlog: int,
        most: int,
        num_decodes: int = 0,
        num_prompts: int = 1,
        prompt_len: float = 0.0,
        num_cached: int = 0,
    ) -> int:
        self.beside_decodes.append((backlog, most, num_decodes, num_prompts, prompt_len, num_cached))
        return min(most, self._limit)

    def tokens_for_many_prompts(
        self, most: int, num_decodes: int = 0, num_prompts: int = 1, prompt_len: float = 0.0, num_cached: int = 0
    ) -> int:
        self.for_many.append((most, num_decodes, num_prompts, prompt_len, num_cached))
        return min(most, self._limit)

    def tokens_beside_lagging(self, most: int, num_decodes: int = 0, num_cached: int = 0) -> int:
        self.beside_lagging.append((most, num_decodes, num_cached))
        return min(most, 4)

    def record_step(self, num_prompt_tokens: int, seconds: float, num_decodes: int = 0, num_cached: int = 0) -> None:
        self.steps.append((num_prompt_tokens, seconds, num_decodes, num_cached))

    def record_launch(self, num_tokens: int, seconds: float) -> None:
        self.launches.append((num_tokens, seconds))


def asked(steps: Steps, limit: int = 10**6) -> Asked:
    budget = steps.scheduler._prefill_budget = Asked(limit)
    return budget


def test_prompts_are_weighed_against_what_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(max_num_seqs=4, budget=16)
    budget = asked(steps)
    steps.add("a", 40)
    for _ in range(4):
        steps.step()
    assert (budget.beside_decodes, budget.for_many) == ([], []), "there is nothing to weigh"
    steps.add("b", 20)
    steps.step()
    assert budget.for_many == [(16, 1, 1, 20.0, 41)], "as many prompts as decodes"
    steps.step()
    assert budget.for_many[1:] == [(16, 1, 1, 5.0, 42)], "the rest of it"
    steps.add("c", 30)
    steps.step()
    assert budget.beside_decodes == [(30, 16, 2, 1, 30.0, 43 + 20)]
    steps.step()
    assert budget.beside_decodes[1:] == [(16, 16, 2, 1, 16.0, 44 + 21)]
    for num_tokens in (10, 12, 14):
        steps.add(f"d{num_tokens}", num_tokens)
    monkeypatch.setattr(scheduler_module, "BACKLOG_SEQS", 2)
    steps.step()
    assert budget.for_many[2:] == [(16, 2, 2, (2 + 10 + 12) / 3, 45 + 22)], (
        "one seat is free, and two of those that wait count"
    )


def test_steps_are_weighed_to_the_end_of_the_last_prompt() -> None:
    steps = Steps(budget=16)
    steps.add("a", 3)
    steps.step()
    steps.add("b", 17)
    assert steps.step()["b"] == 15
    budget = asked(steps)
    for _ in range(3):
        steps.step()
    assert budget.for_many == [(16, 1, 1, 2.0, 4)]
    assert budget.beside_decodes == [], "decodes alone have nothing to weigh"


def test_steps_without_drafts_are_measured_by_their_prompts_tokens() -> None:
    steps = Steps()
    budget = asked(steps)
    steps.add("a", 5)
    steps.step()
    steps.add("b", 2)
    steps.add("c", 9)
    step = steps.schedule()
    steps.scheduler.record_duration(step, 0.5)
    assert budget.steps == [(11, 0.5, 1, 6)], "not the decode's token"
    step.reads_texts = True
    steps.scheduler.record_duration(step, 0.5)
    step.reads_texts = False
    step.verified = [cast(Any, object())]
    steps.scheduler.record_duration(step, 0.5)
    assert len(budget.steps) == 1, "these take longer for other reasons"
    steps.scheduler.record_launch(step, 0.25)
    assert budget.launches == [(12, 0.25)]


def test_the_prompts_of_a_step_share_its_budget() -> None:
    steps = Steps()
    asked(steps, limit=10)
    heavy, light = steps.add("heavy", 60, account=HEAVY), steps.add("light", 40, account=LIGHT)
    assert steps.step() == {"heavy": 10}
    heavy.account.service, light.account.service = 1000.0, 0.0
    assert steps.step() == {"light": 10}
    assert steps.step() == {"light": 10}
    heavy.account.service, light.account.service = 0.0, 1000.0
    assert steps.step() == {"heavy": 10}


def test_prompts_leave_time_to_decodes_of_an_account_that_was_served_less() -> None:
    steps = Steps(budget=16)
    lights = [steps.add(name, 2, account=LIGHT) for name in ("light0", "light1")]
    steps.step()
    budget = asked(steps)
    heavy = steps.add("heavy", 30, account=HEAVY)

    def step_with_lead(lead: float) -> dict[str, int]:
        lights[0].account.service, heavy.account.service = 1000.0, 1000.0 + lead
        return steps.step()

    assert step_with_lead(MAX_LAG) == {"light0": 1, "light1": 1, "heavy": 14}
    assert step_with_lead(-MAX_LAG - 1) == {"heavy": 14, "light0": 1, "light1": 1}, "its prompt is the one that lags"
    assert budget.beside_lagging == []
    assert step_with_lead(MAX_LAG + 1) == {"light0": 1, "light1": 1, "heavy": 2}, "that was all of it"
    assert budget.beside_lagging == [(16, 2, 4 + 4)]
    assert step_with_lead(MAX_LAG + 1) == {"light0": 1, "light1": 1, "heavy": 1}
    assert len(budget.beside_lagging) == 1, "no prompt is left"
    steps.add("next", 30, account=HEAVY)
    assert step_with_lead(MAX_LAG + 1) == {"light0": 1, "light1": 1, "heavy": 1, "next": 4}, "as one that waits"
    assert step_with_lead(MAX_LAG + 1)["next"] == 4, "and as one that runs"
    assert budget.beside_lagging[1:] == [(16, 2, 6 + 6), (16, 2, 7 + 7)]
    steps.add("own", 30, account=LIGHT)
    assert step_with_lead(MAX_LAG + 1)["own"] > 4, "its own prompts may delay them"
    assert len(budget.beside_lagging) == 3


def test_a_decode_lags_by_more_than_so_much() -> None:
    steps = Steps(budget=16)
    lags, follows = steps.add("lags", 2, account=LIGHT), steps.add("follows", 2, account=AccountRef(3))
    steps.step()
    budget = asked(steps)
    heavy = steps.add("heavy", 30, account=HEAVY)
    heavy.account.service, follows.account.service, lags.account.service = 2 * MAX_LAG, MAX_LAG, MAX_LAG - 1
    steps.step()
    assert budget.beside_lagging == [(16, 1, 2)]


def test_a_prompt_leaves_a_token_to_each_behind_it_and_takes_all_others() -> None:
    steps = Steps(budget=8)
    steps.add("a", 30, priority=-1)
    steps.add("b", 30)
    assert steps.step() == {"a": 8}
    steps.scheduler.waiting.some(1)[0].priority = 0
    for _ in range(3):
        steps.step()
    assert steps.step() == {"a": 1, "b": 7}
    steps.add("c", 3, priority=1)
    assert steps.step() == {"a": 1, "b": 7}, "nothing is left for a third"


def test_a_prompt_goes_on_by_a_token_where_there_is_no_more() -> None:
    steps = Steps(budget=2)
    steps.add("decodes", 2)
    steps.step()
    steps.add("prompt", 5, priority=-1)
    for _ in range(6):
        assert steps.step() == {"decodes": 1, "prompt": 1}


# ---- drafts -------------------------------------------------------------------------------------


def decoding(steps: Steps, *num_tokens: int) -> list[Sequence]:
    """Sequences whose prompts are computed."""
    sequences = [steps.add(f"s{number}", count) for number, count in enumerate(num_tokens)]
    while any(sequence.num_output_tokens == 0 for sequence in sequences):
        steps.step()
    return sequences


def drafted(steps: Steps, *sequences: Sequence, length: int = 9) -> list[int]:
    """The number of draft tokens of each sequence in the next step."""
    for sequence in sequences:
        sequence.draft, sequence.draft_source = [7] * length, "ngram"
    found = tokens_of(steps.schedule())
    assert [found[one.request_id] for one in sequences] == [1 + len(one.draft) for one in sequences]
    return [len(one.draft) for one in sequences]


def test_drafts_share_a_steps_room_evenly() -> None:
    """The longest are cut, since the first tokens of a draft are the likeliest."""
    for max_drafts, expected in ((1, [1, 0]), (3, [1, 1]), (4, [2, 2]), (6, [3, 3])):
        steps = Steps(max_drafts=max_drafts)
        assert drafted(steps, *decoding(steps, 3, 3), length=3) == expected
    none = Steps()
    assert drafted(none, *decoding(none, 3)) == [0]


def test_a_draft_leaves_a_token_of_the_budget_to_each_behind_it() -> None:
    steps = Steps(budget=8, max_drafts=20)
    assert drafted(steps, *decoding(steps, 2, 2, 2)) == [5, 0, 0]


def test_a_draft_takes_blocks_only_where_each_running_sequence_has_one_to_spare() -> None:
    for num_blocks, expected in ((2, 0), (3, 3), (4, 7), (5, 9)):
        steps = Steps(num_blocks=num_blocks, max_drafts=20)
        assert drafted(steps, *decoding(steps, 4)) == [expected], num_blocks
    steps = Steps(num_blocks=6, max_drafts=20)
    assert drafted(steps, *decoding(steps, 4, 4)) == [7, 0]


def test_a_draft_leaves_a_block_to_what_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(num_blocks=5, max_drafts=20)

    def start_load(sequence: Sequence) -> bool:
        return sequence.request_id == "loads" and steps.blocks.allocate(sequence, sequence.num_tokens)

    monkeypatch.setattr(steps.blocks, "start_load", start_load)
    steps.add("loads", 4)
    assert drafted(steps, *decoding(steps, 4)) == [3], "one block of three"


def test_tokens_of_a_draft_that_were_rejected_are_not_computed() -> None:
    steps = Steps(max_drafts=20, prefix_caching=True)
    (sequence,) = decoding(steps, 3)
    sequence.draft, sequence.draft_source = [7] * 9, "ngram"
    step = steps.schedule()
    assert (sequence.num_computed_tokens, len(sequence.block_table)) == (13, 4)
    sequence.num_drafter_tokens = 11
    steps.scheduler.give_back(sequence, 0)
    assert sequence.num_computed_tokens == 13
    steps.scheduler.give_back(sequence, 8)
    assert (sequence.num_computed_tokens, sequence.num_drafter_tokens, len(sequence.block_table)) == (5, 5, 2)
    sequence.token_ids.extend([7, 1])
    steps.scheduler.publish(step)
    assert sequence.num_published_blocks == 1
    steps.scheduler.finish(sequence, "stop")
    steps.scheduler.give_back(sequence, 3)
    assert sequence.num_computed_tokens == 5, "it has no blocks any more"


def test_penalties_are_counted_anew_where_a_draft_was_rejected() -> None:
    for penalty, num_counted in ((0.5, 1), (0.0, 0)):
        steps = Steps(max_drafts=20)
        sequence = steps.add("a", 3, presence_penalty=penalty)
        steps.step()
        sequence.draft, sequence.draft_source = [7, 7], "ngram"
        steps.complete(steps.schedule())
        sequence.draft = []
        steps.scheduler.give_back(sequence, 2)
        assert len(steps.schedule().batch.slot_inits) == num_counted


def test_a_sequence_waits_for_a_mask_while_its_constraint_is_not_idle() -> None:
    steps = Steps()
    sequence, other = steps.add("a", 3), steps.add("b", 3)
    constraint = SimpleNamespace(is_idle=True, is_complete=False)
    sequence.constraint = cast(Any, constraint)
    for is_idle in (True, False, True):
        constraint.is_idle = is_idle
        for each in (sequence, other):
            steps.scheduler.note_constraint(each)
        step = steps.schedule()
        assert [found for _, found, _ in step.constrained] == ([] if is_idle else [sequence])
        steps.complete(step)


# ---- rows of one token --------------------------------------------------------------------------


def test_tokens_behind_a_prompt_are_a_row_each_of_which_a_step_has_so_many() -> None:
    steps = Steps(max_num_seqs=4, batch_invariant=True)

    def add(name: str, num_prompt_tokens: int, num_output_tokens: int) -> Sequence:
        sequence = steps.add(name, num_prompt_tokens)
        sequence.prefill_end = num_prompt_tokens - 1
        sequence.token_ids.extend([1] * num_output_tokens)
        return sequence

    add("a", 10, 3)
    add("b", 10, 3)
    add("c", 10, 0)
    assert steps.step() == {"a": 13, "b": 11, "c": 10}, "four beside the first of each"
    assert steps.step() == {"a": 1, "b": 2, "c": 1}
    chunked = Steps(max_num_seqs=4, budget=8, batch_invariant=True)
    late = chunked.add("e", 10)
    late.prefill_end = 9
    late.token_ids.extend([1] * 12)
    assert [chunked.step()["e"] for _ in range(4)] == [8, 6, 5, 3], "one before it; the first, and four behind"
    few = Steps(max_num_seqs=2, batch_invariant=True)
    for name, num_outputs in (("f", 0), ("g", 3)):
        sequence = few.add(name, 10)
        sequence.prefill_end = 9
        sequence.token_ids.extend([1] * num_outputs)
    assert few.step() == {"f": 10, "g": 12}, "a prompt alone takes none of them"
    free = Steps(max_num_seqs=4)
    free.add("d", 10).token_ids.extend([1] * 9)
    assert free.step() == {"d": 19}


# ---- admission ----------------------------------------------------------------------------------


def test_a_step_starts_no_more_once_it_has_matched_so_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(prefix_caching=True)
    first = steps.add("first", 16)
    steps.step()
    for name in "abcdef":
        steps.add(name, 16).token_ids = first.token_ids[:16]
    monkeypatch.setattr(scheduler_module, "MAX_MATCHED_BLOCKS", 6)
    assert list(steps.step()) == ["first", "a", "b"], "three of each"
    monkeypatch.setattr(scheduler_module, "MAX_MATCHED_BLOCKS", 7)
    assert list(steps.step()) == ["first", "a", "b", "c", "d", "e"]


def test_a_step_has_no_more_sequences_than_seats_and_tokens() -> None:
    steps = Steps(max_num_seqs=2, budget=8)
    for name in "abc":
        steps.add(name, 3)
    assert steps.step() == {"a": 3, "b": 3}
    assert steps.scheduler.has_unfinished
    few = Steps(budget=6)
    sequences = [few.add(name, 3) for name in "abc"]
    assert few.step() == {"a": 3, "b": 3}
    stats = few.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (2, 1, 2)
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (62, 0)
    for sequence in sequences:
        few.scheduler.finish(sequence, "stop")
        assert sequence.finish_reason == "stop"
    assert not few.scheduler.has_unfinished


def test_a_sequence_whose_last_token_is_on_the_way_computes_no_more() -> None:
    steps = Steps()
    sequence = steps.add("a", 3)
    sequence.max_num_tokens = 5
    steps.complete(steps.schedule())
    steps.schedule()
    assert steps.scheduler.schedule(now=1.0) is None
    assert sequence.num_computed_tokens == 4


def test_the_last_that_runs_gives_its_own_blocks_up() -> None:
    steps = Steps(num_blocks=3)
    first, last = steps.add("first", 4), steps.add("last", 4)
    assert steps.step() == {"first": 4, "last": 4}
    step = steps.schedule()
    assert (tokens_of(step), step.preempted) == ({"first": 1}, [last])
    assert steps.scheduler.running == [first]


def test_times_and_cached_tokens_are_those_of_the_first_step() -> None:
    steps = Steps()
    sequence = steps.add("a", 3)
    steps.step()
    assert (sequence.first_scheduled_time, sequence.num_cached_tokens) == (1.0, 0)
    steps.scheduler._preempt(sequence)
    steps.scheduler.schedule(now=7.0)
    assert (sequence.first_scheduled_time, sequence.num_preemptions) == (1.0, 1)


def test_blocks_of_a_sequence_that_failed_are_not_found() -> None:
    for reason, num_cached in (("stop", 2), ("error", 0)):
        steps = Steps(prefix_caching=True)
        sequence = steps.add("a", 8)
        lane = sequence.lane
        steps.step()
        steps.scheduler.finish(sequence, cast(Any, reason))
        assert len(steps.blocks.cached_blocks) == num_cached
        assert not sequence.account.lanes, "an empty lane is compared with no other"
        waiting = steps.add("b", 8)
        assert waiting.lane is not lane
        steps.scheduler.finish(waiting, "abort")
        assert not waiting.account.lanes
        assert len(steps.scheduler.waiting) == 0


def test_a_sequence_that_is_loaded_has_a_seat_and_is_the_first_to_lose_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(num_blocks=7, max_num_seqs=3)

    def start_load(sequence: Sequence) -> bool:
        return sequence.request_id == "loads" and steps.blocks.allocate(sequence, sequence.num_tokens)

    monkeypatch.setattr(steps.blocks, "start_load", start_load)
    runs, loads = steps.add("runs", 4), steps.add("loads", 8)
    steps.step()
    late = steps.add("late", 8)
    assert list(steps.step()) == ["runs"], "a spare block for each that has a seat"
    stats = steps.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, steps.scheduler.loading) == (1, 2, [loads])
    while loads.has_seat:
        step = steps.schedule()
        assert list(tokens_of(step)) == ["runs"]
        steps.complete(step)
    assert step.preempted == [loads]
    assert (runs.num_preemptions, runs.num_tokens) == (0, 22)
    steps.scheduler.finish(runs, "stop")
    steps.scheduler.finish(late, "abort")
    assert steps.scheduler.schedule(now=1.0) is None
    assert steps.scheduler.loading == [loads]
    assert steps.scheduler.has_unfinished


def test_what_loads_has_one_of_the_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(max_num_seqs=2)
    monkeypatch.setattr(steps.blocks, "start_load", lambda sequence: sequence.request_id == "loads")
    for name in ("loads", "runs", "waits"):
        steps.add(name, 4)
    assert list(steps.step()) == ["runs"]
    assert list(steps.step()) == ["runs"]


def test_blocks_that_are_loaded_count_among_those_that_a_step_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    monkeypatch.setattr(steps.blocks, "start_load", lambda sequence: steps.blocks.allocate(sequence, 12))
    monkeypatch.setattr(scheduler_module, "MAX_MATCHED_BLOCKS", 6)
    sequences = [steps.add(name, 12) for name in "abc"]
    assert steps.scheduler.schedule(now=1.0) is None
    assert steps.scheduler.loading == sequences[:2], "three of each"


@pytest.mark.parametrize("is_awaited", [False, True])
def test_what_was_loaded_starts_once_and_those_that_waited_for_it_start_with_it(
    monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    steps = Steps()
    load = SimpleNamespace(is_done=False)

    def start_load(sequence: Sequence) -> bool:
        sequence.load = cast(Any, load) if sequence.request_id == "loads" else None
        return sequence.load is not None and steps.blocks.allocate(sequence, sequence.num_tokens)

    monkeypatch.setattr(steps.blocks, "start_load", start_load)
    monkeypatch.setattr(steps.blocks, "finish_load", lambda sequence: 0)
    monkeypatch.setattr(steps.scheduler._prefixes, "publish", lambda *arguments: is_awaited)
    loads = steps.add("loads", 4)
    assert steps.scheduler.schedule(now=1.0) is None
    waits = steps.add("waits", 4)
    steps.scheduler._admission_is_blocked = True
    nothing = SimpleNamespace(poll=lambda before_step: None, submit=lambda: None, claim=lambda block: None)
    steps.blocks.tiers = cast(Any, nothing)
    load.is_done = True
    step = steps.schedule()
    assert list(step.admitted) == ([loads, waits] if is_awaited else [loads])
    steps.complete(step)
    assert list(steps.schedule().admitted) == []


def test_a_waiting_sequence_that_ends_leaves_nothing_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    dropped: list[Sequence] = []
    monkeypatch.setattr(steps.blocks, "drop_tail", dropped.append)
    sequence = steps.add("a", 4)
    steps.scheduler.finish(sequence, "abort")
    assert dropped == [sequence]


def test_a_sequence_that_was_loaded_and_preempted_starts_once() -> None:
    steps = Steps()
    sequence = steps.add("a", 4)
    steps.step()
    steps.scheduler._loaded.append(sequence)
    steps.scheduler._preempt(sequence)
    assert [len(steps.schedule().admitted), len(steps.schedule().admitted)] == [1, 0]


class Seats(AdapterSeats):
    """Seats for the sequences named."""

    def __init__(self, *may_run: str) -> None:
        self.may_run = set(may_run)
        self.log: list[str] = []

    def begin_pass(self) -> None:
        self.log.append("pass")

    def can_run(self, sequence: Any) -> bool:
        return sequence.request_id in self.may_run

    def take(self, sequence: Any) -> None:
        self.log.append(f"take {sequence.request_id}")

    def give_back(self, sequence: Any) -> None:
        self.log.append(f"give back {sequence.request_id}")

    def take_loads(self) -> Any:
        return [(len(self.log), None)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_sequence_whose_adapter_has_no_slot_lets_others_pass(is_shared: bool) -> None:
    seats = Seats("b", "c")
    steps = Steps(max_num_seqs=2, adapters=seats)
    sequences = {name: steps.add(name, 2) for name in "abcd"}
    if is_shared:
        sequences["e"] = steps.add("e", 2, account=LIGHT)
    step = steps.schedule()
    assert list(tokens_of(step)) == ["b", "c"]
    assert seats.log == (["pass"] * (1 + 2 * is_shared) + ["take b", "take c"])
    assert cast(Any, step.batch.adapter_loads) == [(len(seats.log), None)]
    steps.complete(step)
    seats.log.clear()
    steps.scheduler.finish(sequences["b"], "stop")
    assert seats.log == ["give back b"]
    seats.may_run = {"a", "d"}
    assert list(steps.step()) == ["c", "a"]


# ---- several accounts ---------------------------------------------------------------------------


def test_an_account_is_charged_for_its_tokens_by_its_weight() -> None:
    steps = Steps()
    alone = steps.add("alone", 10)
    steps.step()
    assert alone.account.service == 11.0
    steps.step()
    assert alone.account.service == 13.0
    other = steps.add("other", 6, account=AccountRef(5, weight=2.0), logprobs=1)
    assert other.account.service == 13.0
    steps.step()
    assert (alone.account.service, other.account.service) == (15.0, 13.0 + (6 + 2) / 2)
    steps.step()
    assert (alone.account.service, other.account.service) == (17.0, 17.0 + (1 + 2) / 2)


def test_accounts_that_others_charge_too_are_the_schedulers() -> None:
    accounts = Accounts()
    steps = Steps(accounts=accounts)
    other = accounts.find(LIGHT)
    accounts.open(other)
    other.charge(50.0)
    assert steps.add("a", 3).account.service == 50.0, "level with what is computed elsewhere"


def test_rows_of_scored_prompts_are_charged() -> None:
    steps = Steps()
    scored = steps.add("scored", 10, prompt_logprobs=0)
    steps.step()
    assert scored.account.service == 10 + 1 + 2 * 9


def test_what_was_computed_before_a_preemption_is_not_charged_again() -> None:
    steps = Steps()
    sequence, other = steps.add("a", 10), steps.add("b", 10, account=LIGHT)
    steps.step()
    before = sequence.account.service
    steps.scheduler._preempt(sequence)
    assert sequence.num_charged_tokens == 10
    assert steps.step()["a"] == 11
    assert sequence.account.service == before + 1 + 1, "one new token, and one that is sampled"
    steps.step()
    assert sequence.account.service == before + 4
    assert other.account.service == before + 4


def test_what_is_computed_again_in_several_steps_is_not_charged_in_any_of_them() -> None:
    steps = Steps(budget=8)
    sequence = steps.add("a", 20)
    other = steps.add("b", 1, account=LIGHT)
    while not sequence.num_output_tokens:
        steps.step()
    other.account.service = sequence.account.service - 100
    before = sequence.account.service
    steps.scheduler._preempt(sequence)
    assert [steps.step()["a"] for _ in range(3)] == [7, 7, 7]
    assert sequence.account.service == before + 1 + 1


def test_a_waiting_prompt_has_its_tokens_kept_by_those_that_go_after_it() -> None:
    for lead, expected in ((1.0, {"light": 10, "heavy": 6}), (0.0, {"heavy": 16}), (-1.0, {"heavy": 16})):
        steps = Steps(budget=16)
        heavy = steps.add("heavy", 60, account=HEAVY)
        steps.step()
        light = steps.add("light", 10, account=LIGHT)
        heavy.account.service = 100.0
        light.account.service = 100.0 - lead + 16.0
        assert steps.step() == expected, f"{lead} ahead"


def test_what_was_kept_for_a_prompt_that_only_loads_is_taken_by_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would compute nothing, and the engine would wait for the copy."""
    steps = Steps(budget=16)
    heavy = steps.add("heavy", 60, account=HEAVY)
    steps.step()

    def start_load(sequence: Sequence) -> bool:
        return sequence is light and steps.blocks.allocate(sequence, sequence.num_tokens)

    monkeypatch.setattr(steps.blocks, "start_load", start_load)
    light = steps.add("light", 40, account=LIGHT)
    heavy.account.service, light.account.service = 100.0, 0.0
    assert steps.step() == {"heavy": 16}
    assert steps.scheduler.loading == [light]
    assert (heavy.num_computed_tokens, heavy.account.service) == (32, 116.0)
    assert steps.step() == {"heavy": 16}
    assert steps.scheduler.running == [heavy], "what loads does not run yet"


def test_nothing_is_kept_for_a_prompt_without_a_spare_block_for_what_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(num_blocks=17, budget=16)

    def start_load(sequence: Sequence) -> bool:
        return sequence.request_id == "loads" and steps.blocks.allocate(sequence, sequence.num_tokens)

    monkeypatch.setattr(steps.blocks, "start_load", start_load)
    for name, num_tokens in (("loads", 8), ("short", 2)):
        steps.add(name, num_tokens, account=HEAVY)
    heavy = steps.add("heavy", 48, account=HEAVY)
    assert [steps.step() for _ in range(2)] == [{"short": 2, "heavy": 14}, {"short": 1, "heavy": 15}]
    light = steps.add("light", 16, account=LIGHT)
    light.num_preemptions = 1
    heavy.account.service, light.account.service = 100.0, 0.0
    assert steps.step() == {"short": 1, "heavy": 15}
    assert list(steps.scheduler.waiting) == [light]


def test_a_waiting_prompt_that_cannot_start_has_nothing_kept() -> None:
    cases: list[tuple[dict[str, Any], int]] = [({"max_num_seqs": 2}, 10), ({"num_blocks": 24}, 72)]
    for options, num_tokens in cases:
        steps = Steps(budget=16, **options)
        short, _ = steps.add("short", 2, account=HEAVY), steps.add("long", 60, account=HEAVY)
        assert steps.step() == {"short": 2, "long": 14}
        light = steps.add("light", num_tokens, account=LIGHT)
        light.num_preemptions = 1
        short.account.service = 100.0
        light.account.service = 0.0
        assert steps.step() == {"short": 1, "long": 15}, options


def test_a_long_waiting_prompt_has_a_whole_step_kept() -> None:
    steps = Steps(budget=16)
    heavy = steps.add("heavy", 60, account=HEAVY)
    steps.step()
    light = steps.add("light", 40, account=LIGHT)
    heavy.account.service = 100.0
    light.account.service = 0.0
    assert steps.step() == {"light": 16}


@pytest.mark.parametrize(("prefix_caching", "num_tokens", "cost"), [(False, 10, 10), (True, 10, 2), (True, 8, 0)])
def test_a_new_accounts_sequence_takes_a_seat_and_its_account_pays_for_it(
    prefix_caching: bool, num_tokens: int, cost: int
) -> None:
    steps = Steps(max_num_seqs=2, prefix_caching=prefix_caching)
    heavy = [steps.add(f"heavy{number}", num_tokens, account=HEAVY) for number in range(2)]
    steps.step()
    light = steps.add("light", 4, account=LIGHT)
    step = steps.schedule()
    assert step.preempted == [heavy[1]]
    assert heavy[1].displaced_by is light.account
    assert set(tokens_of(step)) == {"heavy0", "light"}
    steps.complete(step)
    steps.scheduler.finish(light, "stop")
    before = light.account.service
    assert steps.step()["heavy1"] == 1 + cost
    assert light.account.service == before + cost, "what is computed again because of it"
    assert heavy[1].displaced_by is None


@pytest.mark.parametrize(("lacks", "options"), [("seats", {"max_num_seqs": 4}), ("blocks", {"num_blocks": 16})])
def test_who_has_the_most_of_what_is_lacking_makes_way(lacks: str, options: dict[str, Any]) -> None:
    steps = Steps(**options)
    short = [steps.add(f"short{number}", 4, account=AccountRef(3)) for number in range(3)]
    long = steps.add("long", 40, account=HEAVY)
    steps.step()
    light = steps.add("light", 12, account=LIGHT)
    step = steps.schedule()
    assert step.preempted == [short[2] if lacks == "seats" else long]
    assert list(step.admitted) == [light]


@pytest.mark.parametrize("reason", ["its last step runs", "it waits for a prefix"])
def test_none_makes_way_for_a_sequence_that_cannot_start_yet(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    steps = Steps(max_num_seqs=2)
    for number in range(2):
        steps.add(f"heavy{number}", 3, account=HEAVY)
    steps.step()
    light = steps.add("light", 3, account=LIGHT)
    if reason == "its last step runs":
        light.num_pending_tokens = 1
    else:
        monkeypatch.setattr(steps.scheduler._prefixes, "is_waiting", lambda sequence: sequence is light)
    step = steps.schedule()
    assert not step.preempted
    assert list(tokens_of(step)) == ["heavy0", "heavy1"]


def test_none_makes_way_for_a_sequence_whose_adapter_has_no_slot() -> None:
    steps = Steps(max_num_seqs=2, adapters=Seats("heavy0", "heavy1"))
    for number in range(2):
        steps.add(f"heavy{number}", 3, account=HEAVY)
    steps.step()
    steps.add("light", 3, account=LIGHT)
    step = steps.schedule()
    assert not step.preempted
    assert list(tokens_of(step)) == ["heavy0", "heavy1"]


def test_another_accounts_sequence_starts_although_the_first_found_no_room() -> None:
    steps = Steps(num_blocks=8)
    heavy = steps.add("heavy", 15, account=HEAVY)
    steps.step()
    steps.add("large", 20, account=HEAVY)
    light = steps.add("light", 4, account=LIGHT)
    light.account.service = heavy.account.service + 1000.0
    assert list(steps.step()) == ["heavy"]
    heavy.account.service = light.account.service + 1000.0
    assert list(steps.step()) == ["heavy", "light"]


def test_a_new_accounts_sequence_takes_as_many_blocks_as_it_needs() -> None:
    steps = Steps(num_blocks=15)
    heavy = [steps.add(f"heavy{number}", 12, account=HEAVY) for number in range(4)]
    steps.step()
    light = steps.add("light", 16, account=LIGHT)
    step = steps.schedule()
    assert step.preempted == [heavy[3], heavy[2]]
    assert list(step.admitted) == [light]


def test_running_sequences_are_in_order_again_once_one_account_is_left() -> None:
    steps = Steps()
    kept = [steps.add(f"a{number}", 2, account=HEAVY) for number in range(2)]
    late = steps.add("a2", 2, account=HEAVY)
    steps.scheduler.waiting.remove(late)
    others = [steps.add(f"b{number}", 2, account=LIGHT) for number in range(3)]
    steps.step()
    kept[0].account.service = others[0].account.service + 1
    steps.scheduler.waiting.enqueue(late)
    assert list(steps.step()) == ["b0", "b1", "b2", "a0", "a1", "a2"]
    for other in others:
        steps.scheduler.finish(other, "stop")
        steps.scheduler.accounts.close(other.account)
    assert list(steps.step()) == ["a0", "a1", "a2"]


def test_a_sequence_that_was_preempted_waits_for_the_next_step_and_others_start() -> None:
    steps = Steps(num_blocks=10)
    heavy = [steps.add(f"heavy{number}", 15, account=HEAVY) for number in range(2)]
    for _ in range(6):
        steps.step()
    light = steps.add("light", 4, account=LIGHT)
    heavy[0].account.service, light.account.service = 0.0, 1000.0
    step = steps.schedule()
    assert step.preempted == [heavy[1]]
    assert list(tokens_of(step)) == ["heavy0", "light"], "the one in front of it waits"
    assert list(steps.scheduler.waiting) == [heavy[1]]
