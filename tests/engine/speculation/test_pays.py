"""`auto`: drafts where measured acceptance and the measured cost of a step say that they save time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.speculation.draft_lengths import Candidate, choose_lengths, longest_of, may_pay
from tessera.engine.speculation.step_costs import FEWEST, DraftCost, StepCosts
from tests.bench.speculation import Held
from tests.support.fakes.fake_runner import Harness
from tests.support.fakes.virtual_drafts import DraftedEngine

SECONDS = 0.01
HOST_SECONDS = 0.0002
NUM_TOKENS = 120


def measured(num_seqs: int, plain: float, *drafted: tuple[int, float]) -> StepCosts:
    """Steps of so many sequences without drafts, and then some with as many as each says."""
    costs = StepCosts()
    for _ in range(FEWEST):
        costs.record_step(num_seqs, 0, plain)
    for num_drafts, seconds in drafted:
        costs.record_step(num_seqs, num_drafts, seconds)
    return costs


def lengths(costs: StepCosts, num_seqs: int, rate: float) -> list[int]:
    """Of drafts where each token is chosen with this probability."""
    found = costs.expect(num_seqs)
    if found is None or not may_pay(num_seqs, 7, found, 256):
        return [0] * num_seqs
    return choose_lengths([Candidate(rate, 7)] * num_seqs, num_seqs, found, 256)


def drafts_of(costs: StepCosts, num_seqs: int) -> DraftCost:
    found = costs.expect(num_seqs)
    assert found is not None
    return found.drafts


def test_a_draft_token_must_save_what_it_costs() -> None:
    costs = measured(4, 0.010)
    assert lengths(costs, 4, 0.01) == [7] * 4, "to be tried"
    costs.record_step(4, 28, 0.017)
    # 4 tokens take 10 ms, a draft token 0.25 ms: it saves 2.5 ms where it is accepted.
    assert drafts_of(costs, 4).each == pytest.approx(0.00025)
    assert lengths(costs, 4, 0.09) == [0] * 4
    assert lengths(costs, 4, 0.15) == [1] * 4
    assert lengths(costs, 4, 0.999) == [7] * 4


def test_where_drafts_are_more_than_a_step_takes_the_longest_are_cut() -> None:
    assert longest_of([], 4) == 0
    assert longest_of([3, 1, 0], 4) == 3
    assert longest_of([7, 7, 1, 3], 12) == 4, "4, 4, 1 and 3 tokens"
    assert longest_of([7, 7, 1, 3], 11) == 3
    assert longest_of([5] * 9, 4) == 1, "each keeps one"


def test_nothing_is_drafted_before_steps_without_drafts_are_known() -> None:
    costs = StepCosts()
    for _ in range(FEWEST):
        assert costs.expect(4) is None
        costs.record_step(4, 0, 0.010)
    assert costs.expect(4) is not None
    assert costs.expect(5) is not None, "it takes as long"
    assert costs.expect(9) is None


def test_steps_of_numbers_between_known_ones_are_known() -> None:
    costs = measured(16, 0.004)
    for _ in range(FEWEST):
        costs.record_step(256, 0, 0.010)
    found = costs.expect(136)
    assert found is not None
    assert found.plain == pytest.approx(0.007)


def test_long_drafts_pay_where_it_is_the_first_token_that_is_dear() -> None:
    costs = measured(64, 0.005)
    for number in range(40):
        num_drafts = 128 + 64 * (number % 2)
        costs.record_step(64, num_drafts, 0.005 + 0.006 + 5e-6 * num_drafts)
    costs.record_step(64, 0, 0.005)
    cost = drafts_of(costs, 64)
    assert cost.fixed == pytest.approx(0.006, rel=0.2)
    assert cost.each == pytest.approx(5e-6, abs=8e-6)
    assert lengths(costs, 64, 0.8) == [4] * 64, "as many as a step takes"
    assert lengths(costs, 64, 0.3) == [0] * 64, "no length saves what the first one costs"


def test_what_is_not_known_of_many_sequences_is_taken_from_fewer() -> None:
    costs = StepCosts()
    for num_seqs, seconds in ((1, 0.004), (64, 0.005), (256, 0.010)):
        for _ in range(FEWEST):
            costs.record_step(num_seqs, 0, seconds)
    costs.record_step(1, 7, 0.0047)
    assert drafts_of(costs, 64).each == 0.0, "one is much fewer than 64"
    costs.record_step(64, 256, 0.015, is_plain=False)
    assert drafts_of(costs, 256).each == 0.0, "a bound is no measurement"
    costs.record_step(64, 256, 0.0154)
    assert lengths(costs, 64, 0.8)[0] > 0
    assert lengths(costs, 256, 0.999) == [0] * 256
    num_steps = 0
    while not any(lengths(costs, 256, 0.8)):
        costs.record_step(256, 0, 0.010)
        costs.record_step(64, 0, 0.005)
        num_steps += 1
    assert 50 < num_steps < 200, "it is tried in the end"
    costs.record_step(256, 256, 0.0125)
    assert lengths(costs, 256, 0.8) == [1] * 256


@pytest.mark.parametrize("num_slow", [1, FEWEST])
def test_first_steps_that_were_slow_do_not_make_drafts_look_cheap_for_ever(num_slow: int) -> None:
    costs, num_plain, num_drafted = StepCosts(), 0, 0
    while num_plain + num_drafted < 200:
        if any(lengths(costs, 256, 0.8)):
            costs.record_step(256, 256, 0.021)
            num_drafted += 1
        else:
            costs.record_step(256, 0, 0.0145 if num_plain < num_slow else 0.0097)
            num_plain += 1
    assert num_drafted <= (2 if num_slow < FEWEST else 40)


def test_what_is_drafted_with_profit_is_seldom_compared_with_steps_without() -> None:
    costs = measured(1, 0.0038)
    drafted = [any(lengths(costs, 1, 0.8))]
    for _ in range(3000):
        costs.record_step(1, 7 if drafted[-1] else 0, 0.0042 if drafted[-1] else 0.0038)
        drafted.append(any(lengths(costs, 1, 0.8)))
    assert 0.99 < sum(drafted) / len(drafted) < 1.0


def test_one_slow_step_with_drafts_says_little() -> None:
    costs = measured(64, 0.005, *[(256, 0.0125)] * 20)
    costs.record_step(64, 256, 1.0)
    assert lengths(costs, 64, 0.9)[0] > 0


def test_what_was_too_dear_is_tried_again() -> None:
    costs = measured(100, 0.020, (10, 0.080))
    num_steps = 0
    while not any(lengths(costs, 100, 0.9)):
        costs.record_step(100, 0, 0.020)
        num_steps += 1
    assert num_steps > 100, "rarely"


def test_what_drafts_cost_beside_prompts_is_bounded_until_it_is_measured() -> None:
    costs = measured(4, 0.010)
    costs.record_step(4, 8, 0.170, is_plain=False)
    assert drafts_of(costs, 4).each == pytest.approx(0.020)
    costs.record_step(4, 8, 0.090, is_plain=False)
    assert drafts_of(costs, 4).each == pytest.approx(0.010)
    costs.record_step(4, 8, 0.018)
    assert drafts_of(costs, 4).each == pytest.approx(0.001)
    costs.record_step(4, 8, 0.090, is_plain=False)
    assert drafts_of(costs, 4).each == pytest.approx(0.001)


def test_what_stays_too_dear_is_tried_less_and_less() -> None:
    costs, trials = measured(100, 0.020, (10, 0.080)), list[int]()
    for number in range(10_000):
        if any(lengths(costs, 100, 0.9)):
            trials.append(number)
            costs.record_step(100, 10, 0.080)
        else:
            costs.record_step(100, 0, 0.020)
    between = [later - earlier for earlier, later in pairwise(trials)]
    assert len(trials) > 2
    assert between[0] > 1.5 * trials[0]
    assert max(between) < 8 * trials[0], "but it is tried"


def test_a_trial_beside_prompts_is_one_trial() -> None:
    costs = measured(100, 0.020, (10, 0.080))
    dear = drafts_of(costs, 100)
    while not any(lengths(costs, 100, 0.9)):
        costs.record_step(100, 0, 0.020)
    costs.record_step(100, 10, 0.500, is_plain=False)
    assert drafts_of(costs, 100) == dear


@pytest.fixture(scope="module")
def plain_speeds() -> dict[int, float]:
    engine = DraftedEngine("off")
    return {streams: engine.serve(streams, 160) for streams in (1, 16, 64, 256)}


@pytest.mark.parametrize(
    ("streams", "acceptance", "least"),
    [(1, 0.8, 3.3), (16, 0.8, 2.2), (16, 0.1, 0.98), (64, 0.8, 1.15), (64, 0.3, 0.98), (256, 0.8, 0.98)],
)
def test_a_server_is_about_as_fast_as_the_better_of_with_and_without(
    plain_speeds: dict[int, float], streams: int, acceptance: float, least: float
) -> None:
    """`least`: speed with `auto`, as a multiple of that without drafts."""
    with Held(acceptance, 1):
        engine = DraftedEngine("auto")
        for fewer in (1, 16, 64):  # what came before
            if fewer < streams:
                engine.serve(fewer, 80)
        assert engine.serve(streams, 160) > least * plain_speeds[streams]


def test_a_server_whose_first_steps_were_slow_finds_it_out(plain_speeds: dict[int, float]) -> None:
    num_plain = 0

    def more(batch: StepBatch) -> float:
        nonlocal num_plain
        num_plain += batch.num_tokens == 256 == len(batch.context_lens)
        return 0.006 if num_plain <= FEWEST + 1 else 0.0

    with Held(0.8, 1):
        engine = DraftedEngine("auto", more)
        for streams in (1, 64, 256):
            engine.serve(streams, 160)
        assert engine.serve(256, 160) > 0.97 * plain_speeds[256]


def test_a_trial_that_was_too_dear_is_one_step() -> None:
    num_drafts: list[int] = []

    def more(batch: StepBatch) -> float:
        if len(batch.context_lens) == 256:
            num_drafts.append(batch.num_sampled - 256)
        return 0.0

    with Held(0.8, 1):
        engine = DraftedEngine("auto", more)
        for streams in (1, 64, 256):
            engine.serve(streams, 400)
    assert any(num_drafts), "it is tried"
    assert not any(one and other for one, other in pairwise(num_drafts))


def run(seconds_per_draft: float, num_requests: int, **settings: Any) -> tuple[float, Harness]:
    """Time for a server whose steps take SECONDS, and more for each draft token."""
    engine = Harness(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=512, asynchronous=True, **settings)
    engine.runner.say = lambda context: 1 + (len(context) // 40 + len(context)) % 10  # periodic for 40 tokens
    start = engine.now
    for number in range(num_requests):
        engine.add(f"r{number}", [1 + number, 7, 8], NUM_TOKENS)
    while engine.core.has_work:
        seconds = HOST_SECONDS
        if engine.core._in_flight:
            oldest = engine.core._in_flight[0][0]
            seconds += SECONDS + seconds_per_draft * oldest.num_draft_tokens
        engine.step(seconds)
    return engine.now - start, engine


@pytest.mark.parametrize("num_requests", [1, 24])
def test_drafts_save_time_where_they_cost_little(num_requests: int) -> None:
    plain, _ = run(0.0, num_requests)
    auto, engine = run(SECONDS / 1000, num_requests, speculation="auto")
    assert auto < 0.6 * plain
    assert all(len(tokens) == NUM_TOKENS for tokens in engine.token_ids.values())


def test_drafts_that_cost_more_than_they_save_are_given_up() -> None:
    plain, _ = run(0.0, 24)
    always, _ = run(SECONDS / 8, 24, speculation="on")
    auto, _ = run(SECONDS / 8, 24, speculation="auto")
    assert always > 1.5 * plain
    assert auto < 1.2 * plain, "a few steps were enough to see it"


def test_a_server_in_which_prompts_never_end_learns_what_drafts_cost() -> None:
    def serve(**settings: Any) -> float:
        engine = Harness(num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=2048, asynchronous=True, **settings)
        engine.runner.say = lambda context: 1 + (len(context) // 40 + len(context)) % 10
        start, num_sent = engine.now, 0
        while num_sent < 60 or engine.core.has_work:
            while num_sent < 60 and engine.now >= start + num_sent * 1.5 * SECONDS:
                engine.add(f"r{num_sent}", [1 + num_sent % 90, 7, 8], 20 + num_sent % 3 * 40)
                num_sent += 1
            drafts = engine.core._in_flight[0][0].num_draft_tokens if engine.core._in_flight else 0
            engine.step(SECONDS * (1 + drafts / 4))
        return engine.now - start

    assert serve(speculation="auto") < 1.2 * serve()


def test_a_sequence_whose_drafts_are_rejected_runs_ahead_again() -> None:
    engine = Harness(num_blocks=400, asynchronous=True, speculation="auto", speculative_method="ngram")
    # Every token follows token 7 now and then, so that look-up finds something and is nearly always wrong.
    engine.runner.say = lambda context: 7 if len(context) % 2 else 10 + len(context) * 31 % 80
    engine.add("r", [1, 7], 200)
    engine.run()
    speculator = engine.core._speculator
    assert speculator is not None
    assert engine.core.num_steps <= 215


def test_params_have_no_part_in_it() -> None:
    """A greedy sequence and a sampled one are drafted alike."""
    for params in (SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=1.5)):
        engine = Harness(num_blocks=400, speculation="on", speculative_method="ngram")
        engine.runner.say = lambda context: 1 + len(context) % 4
        engine.add("r", [1, 2, 3, 4, 1, 2, 3, 4], 40, temperature=params.temperature)
        engine.run()
        assert engine.core.num_steps < 12


def test_the_step_behind_a_draft_is_computed_while_the_drafts_tokens_are_sent() -> None:
    engine = Harness(num_blocks=400, asynchronous=True, speculation="on", speculative_method="ngram")
    engine.runner.say = lambda context: 1 + len(context) % 4
    engine.add("r", [1, 2, 3, 4, 1, 2, 3, 4], 60)
    drafted = 0
    while engine.core.has_work:
        outputs = [output for each in engine.step().values() for output in each]
        if outputs and len(outputs[0].token_ids) > 1 and outputs[0].finish_reason is None:
            drafted += 1
            assert engine.core._in_flight, "the device waits for the host to send tokens"
    assert drafted > 4
