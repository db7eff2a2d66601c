"""`auto`: drafts where measured acceptance and the measured cost of a step say that they save time."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.speculation.step_costs import StepCosts
from tests.support.fake_runner import Harness

SECONDS = 0.01
HOST_SECONDS = 0.0002
NUM_TOKENS = 120


def test_a_draft_token_must_save_what_it_costs() -> None:
    costs = StepCosts()
    assert costs.least_probability(4) == 1.0, "nothing is known"
    costs.record_step(4, 0, 0.010)
    assert costs.least_probability(4) == 0.0, "to be tried"
    costs.record_step(4, 8, 0.012)
    # 4 tokens take 10 ms, a draft token 0.25 ms: it saves 2.5 ms where it is accepted.
    assert costs.least_probability(4) == pytest.approx(0.1)
    assert costs.least_probability(5) == 1.0, "other numbers of sequences are measured on their own"


def test_what_is_not_known_of_many_sequences_is_taken_from_fewer() -> None:
    costs = StepCosts()
    for num_seqs, seconds in ((1, 0.004), (64, 0.005), (256, 0.010)):
        costs.record_step(num_seqs, 0, seconds)
    costs.record_step(1, 7, 0.0047)
    assert costs.least_probability(64) == 0.0, "one is much fewer than 64"
    costs.record_step(64, 256, 0.015, is_plain=False)
    assert costs.least_probability(256) == 0.0, "a bound is no measurement"
    costs.record_step(64, 256, 0.01524)
    assert costs.least_probability(64) == pytest.approx(0.512)
    assert costs.least_probability(256) == pytest.approx(0.997 * 1.024)
    num_steps = 0
    while costs.least_probability(256) > 0.8:
        costs.record_step(256, 0, 0.010)
        num_steps += 1
    assert 50 < num_steps < 200, "it is tried in the end"
    costs.record_step(256, 256, 0.015)
    assert costs.least_probability(256) == pytest.approx(0.5)


def test_a_first_step_that_was_slow_does_not_make_drafts_look_cheap_for_ever() -> None:
    costs = StepCosts()
    costs.record_step(4, 0, 1.0)
    for _ in range(60):
        costs.record_step(4, 8, 0.018)
    assert costs.least_probability(4) < 0.1
    for _ in range(60):
        costs.record_step(4, 0, 0.010)
        costs.record_step(4, 8, 0.018)
    assert costs.least_probability(4) == pytest.approx(0.4, rel=0.05)


def test_what_was_too_dear_is_tried_again() -> None:
    costs = StepCosts()
    costs.record_step(100, 0, 0.020)
    costs.record_step(100, 10, 0.080)
    assert costs.least_probability(100) > 1.0
    num_steps = 0
    while costs.least_probability(100) > 1.0:
        costs.record_step(100, 0, 0.020)
        num_steps += 1
    assert num_steps > 100, "rarely"


def test_what_drafts_cost_beside_prompts_is_bounded_until_it_is_measured() -> None:
    costs = StepCosts()
    costs.record_step(4, 0, 0.010)
    assert costs.least_probability(4) == 0.0, "they are tried"
    costs.record_step(4, 8, 0.170, is_plain=False)
    assert costs.least_probability(4) == pytest.approx(8.0)
    costs.record_step(4, 8, 0.090, is_plain=False)
    assert costs.least_probability(4) == pytest.approx(4.0)
    costs.record_step(4, 8, 0.018)
    assert costs.least_probability(4) == pytest.approx(0.4)
    costs.record_step(4, 8, 0.090, is_plain=False)
    assert costs.least_probability(4) == pytest.approx(0.4)


def test_a_trial_beside_prompts_is_one_trial() -> None:
    costs = StepCosts()
    costs.record_step(100, 0, 0.020)
    costs.record_step(100, 10, 0.080)
    dear = costs.least_probability(100)
    while costs.least_probability(100) > 1.0:
        costs.record_step(100, 0, 0.020)
    costs.record_step(100, 10, 0.500, is_plain=False)
    assert costs.least_probability(100) == pytest.approx(dear)


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
