"""The chunked-prefill budget keeps a step with prompts within a multiple of the time of its decodes."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.engine.core.prefill_budget import (
    EXTRA_PER_LONG_PROMPT,
    EXTRA_PER_LONG_PROMPT_AND_DECODE,
    EXTRA_PER_PROMPT,
    LONG_PROMPT,
    MAX_DRAIN_STEPS,
    MAX_LONG_PREFILL_SECONDS,
    MAX_PREFILL_DECODE_STEPS,
    MAX_PREFILL_SECONDS,
    MAX_SLOWDOWN,
    MAX_SLOWDOWN_FOR_OTHERS,
    MAX_SLOWDOWN_SMALL_BACKLOG,
    MIN_PREFILL_TOKENS,
    MIN_ROUND_DOWN,
    SATURATING_EXPERT_ROWS,
    SATURATING_TOKENS,
    SMALL_BACKLOG,
    DecodeReads,
    PrefillBudget,
)
from tessera.engine.core.step_batch import StepBatch
from tests.support.fakes.fake_runner import Harness
from tests.support.fakes.virtual_engine import LLAMA_8B, LLAMA_8B_FP8, QWEN3_06B, fill_steps, run_load

DECODE, TOKEN = 0.005, 0.00002  # seconds of a step of decodes, and what each token of a prompt adds


def learned(full_sizes: tuple[int, ...] = ()) -> PrefillBudget:
    budget = PrefillBudget(full_sizes)
    for _ in range(50):
        budget.record_step(0, DECODE)
        budget.record_step(500, DECODE + 500 * TOKEN)
    return budget


def steps_that_take_time(engine: Harness) -> list[int]:
    """The tokens of each step that the engine makes from here on, and its clock goes on with them."""
    sizes: list[int] = []

    def take_time(batch: StepBatch) -> None:
        sizes.append(batch.num_tokens)
        engine.now += DECODE + (batch.num_tokens - batch.num_seqs) * TOKEN

    engine.runner.inspect = take_time
    return sizes


def test_nothing_is_bounded_before_anything_was_measured() -> None:
    assert PrefillBudget().tokens_beside_decodes(100_000, 8192) == 8192


def test_a_first_step_of_prompts_alone_says_what_tokens_take() -> None:
    """So a burst of prompts on a server that has just started is not all in its second step."""
    budget = PrefillBudget()
    budget.record_step(SATURATING_TOKENS - 1, 0.1)
    budget.record_step(4 * SATURATING_TOKENS, 4 * SATURATING_TOKENS * TOKEN, 1)
    assert budget.tokens_for_many_prompts(8192, 5, 11, 512) == 8192, "too little is known"
    budget.record_step(4 * SATURATING_TOKENS, 4 * SATURATING_TOKENS * TOKEN)
    assert budget.tokens_for_many_prompts(8192, 5, 11, 512) == pytest.approx(MAX_PREFILL_SECONDS / TOKEN, abs=1)
    assert budget.tokens_beside_decodes(4000, 8192, 5) == 8192, "what decodes take is not known"
    for _ in range(50):
        budget.record_step(0, DECODE)
        budget.record_step(500, DECODE + 500 * TOKEN)
    assert budget.tokens_beside_decodes(4000, 8192) == learned().tokens_beside_decodes(4000, 8192)


def test_a_single_slow_step_counts_for_a_quarter() -> None:
    budget = learned()
    before = budget.tokens_beside_decodes(1000, 8192)
    budget.record_step(500, DECODE + 500 * 5 * TOKEN)
    assert budget.tokens_beside_decodes(1000, 8192) == pytest.approx(before / (1 + 0.25 * 4), abs=1)
    for _ in range(20):
        budget.record_step(500, DECODE + 500 * 5 * TOKEN)
    assert budget.tokens_beside_decodes(1000, 8192) == pytest.approx(max(before / 5, MIN_PREFILL_TOKENS), abs=1)


def test_a_step_with_a_prompt_stays_within_the_multiple() -> None:
    tokens = learned().tokens_beside_decodes(1000, 8192)
    assert DECODE + tokens * TOKEN <= MAX_SLOWDOWN * DECODE
    assert DECODE + (tokens + 8) * TOKEN > MAX_SLOWDOWN * DECODE - 1e-9


def test_decodes_take_longer_the_more_they_have_cached() -> None:
    """The time of many long sequences is estimated from that of a few short ones."""
    share, num_cached = 1e-5, 200_000
    budget, long_decode = PrefillBudget(reads=DecodeReads(cached_token=share)), DECODE * (1 + share * num_cached)
    for _ in range(50):
        budget.record_step(0, DECODE * (1 + share * 1000), 1, 1000)
    for _ in range(200):
        tokens = budget.tokens_beside_decodes(4000, 8192, 31, num_cached=num_cached)
        budget.record_step(tokens, long_decode + tokens * TOKEN, 31, num_cached)
    assert tokens == pytest.approx((MAX_SLOWDOWN - 1) * long_decode / TOKEN, abs=1)
    assert budget.tokens_beside_decodes(4000, 8192, 1) == pytest.approx((MAX_SLOWDOWN - 1) * DECODE / TOKEN, abs=1)
    lagging = budget.tokens_beside_lagging(8192, 31, num_cached)
    assert lagging == pytest.approx((MAX_SLOWDOWN_FOR_OTHERS - 1) * long_decode / TOKEN, abs=1)


def test_more_decodes_of_a_mixture_take_longer() -> None:
    """They read more of its experts."""
    reads = DecodeReads(experts=0.9, experts_per_chosen=16)
    budget = PrefillBudget(reads=reads)
    for _ in range(50):
        budget.record_step(0, DECODE, 1)
    long_decode = DECODE * reads.of(32, 0) / reads.of(1, 0)
    assert 5 * DECODE < long_decode < 6 * DECODE
    for _ in range(200):
        tokens = budget.tokens_beside_decodes(4000, 8192, 32)
        budget.record_step(tokens, long_decode + tokens * TOKEN, 32)
    assert tokens == pytest.approx((MAX_SLOWDOWN - 1) * long_decode / TOKEN, abs=1)


def test_one_prompt_may_take_somewhat_longer() -> None:
    tokens = learned().tokens_beside_decodes(SMALL_BACKLOG, 8192)
    assert DECODE + tokens * TOKEN <= MAX_SLOWDOWN_SMALL_BACKLOG * DECODE
    assert tokens > learned().tokens_beside_decodes(SMALL_BACKLOG + 1, 8192)


def test_each_more_that_waits_may_add_to_a_step_up_to_a_bound() -> None:
    alone = learned().tokens_beside_decodes(4000, 8192)
    assert learned().tokens_beside_decodes(4000, 8192, num_prompts=2) == pytest.approx(
        alone * (1 + EXTRA_PER_PROMPT), abs=1
    )
    assert learned().tokens_beside_decodes(4000, 8192, num_prompts=5) == pytest.approx(
        alone * (1 + 4 * EXTRA_PER_PROMPT), abs=1
    )
    bound = max(MAX_PREFILL_SECONDS, MAX_PREFILL_DECODE_STEPS * DECODE) / TOKEN
    assert learned().tokens_beside_decodes(4000, 8192, num_prompts=100) == pytest.approx(bound, abs=1)
    assert learned().tokens_beside_decodes(4000, 200, num_prompts=100) == 200, "a step holds no more"


def test_several_long_prompts_may_add_more_to_a_step_and_one_or_short_ones_may_not() -> None:
    def tokens(num_prompts: int, prompt_len: float) -> int:
        return learned().tokens_beside_decodes(4000, 8192, num_prompts=num_prompts, prompt_len=prompt_len)

    alone = tokens(1, 8000)
    assert tokens(2, 8000) == pytest.approx(alone * (1 + EXTRA_PER_LONG_PROMPT), abs=8)
    assert tokens(2, LONG_PROMPT - 1) == pytest.approx(alone * (1 + EXTRA_PER_PROMPT), abs=1)
    assert tokens(100, 8000) == pytest.approx(MAX_LONG_PREFILL_SECONDS / TOKEN, rel=0.01)
    assert tokens(100, 3000) == 3000, "no longer than one of them takes"


def test_beside_many_decodes_several_long_prompts_may_add_more() -> None:
    def tokens(num_decodes: int, num_prompts: int = 2) -> int:
        return learned().tokens_beside_decodes(4000, 8192, num_decodes, num_prompts, 8000)

    alone = tokens(24, 1)
    assert tokens(4) == tokens(8) == pytest.approx(alone * (1 + EXTRA_PER_LONG_PROMPT), abs=8)
    assert tokens(24) == pytest.approx(alone * (1 + 24 * EXTRA_PER_LONG_PROMPT_AND_DECODE), abs=24)


def test_the_more_long_prompts_wait_the_longer_a_step_may_be() -> None:
    def tokens(num_prompts: int) -> int:
        return learned().tokens_for_many_prompts(8192, 0, num_prompts, 8000)

    assert tokens(4) == learned().tokens_for_many_prompts(8192)
    assert tokens(4) < tokens(12) < tokens(20) == pytest.approx(MAX_LONG_PREFILL_SECONDS / TOKEN, rel=0.01)


def test_many_short_prompts_are_computed_in_the_steps_that_give_the_soonest_first_tokens() -> None:
    """Of n steps the mean first token comes after (n + 1) / 2 of them, each with the time of decodes besides."""

    def mean(num_steps: int) -> float:
        return (num_steps + 1) / 2 * (16 * 512 * TOKEN / num_steps + DECODE)

    best = min(range(1, 17), key=mean)
    assert learned().tokens_for_many_prompts(8192, 0, 16, 512) == pytest.approx(16 * 512 / best, rel=0.1)
    assert learned().tokens_for_many_prompts(8192, 0, 1, 512) > 512, "one alone waits for no other"
    assert learned().tokens_for_many_prompts(8192, 0, 2, 900) == 900, "a prompt in two pieces is later, not sooner"


def launched(seconds: float, token: float = 2e-6) -> PrefillBudget:
    """Learned of a model that computes a prompt's token in `token`, and whose host launches kernels for `seconds`."""
    budget = PrefillBudget((1024, 2048))
    for _ in range(50):
        budget.record_step(0, DECODE)
        budget.record_step(1000, DECODE + 1000 * token)
        budget.record_launch(4000, seconds)
    return budget


def test_no_step_is_longer_than_the_full_sizes_and_shorter_than_launching_its_kernels() -> None:
    """While the host launches for 13 ms the device computes 4,000 tokens beside decodes of 5 ms."""
    budget = launched(0.013)
    sizes = {budget.tokens_for_many_prompts(8192, 0, num_prompts, 512) for num_prompts in range(1, 200)}
    assert any(size <= 2048 for size in sizes)
    assert any(size >= 4000 for size in sizes)
    assert not any(2048 < size < 3999 for size in sizes)
    beside = {budget.tokens_beside_decodes(300 * 512, 8192, 64, num_prompts, 512) for num_prompts in range(1, 20)}
    assert not any(2048 - 64 < size < 3999 for size in beside)
    assert budget.tokens_beside_decodes(2500, 2500, 64, 12, 512) <= 2500, "a step holds no more than it may"

    large = launched(0.013, TOKEN)
    sizes = {large.tokens_beside_decodes(20 * 2500, 8192, 8, num_prompts, 2500) for num_prompts in range(1, 20)}
    assert any(2048 < size < 3000 for size in sizes), "a large model's device is busy for longer"


def test_a_step_whose_kernels_take_longer_to_launch_says_nothing_of_a_token() -> None:
    budget = launched(0.013)
    before = budget.tokens_beside_decodes(100_000, 8192, 8)
    for _ in range(20):
        budget.record_step(3000, 0.0155, 8)
    assert budget.tokens_beside_decodes(100_000, 8192, 8) == before
    for _ in range(20):
        budget.record_step(1800, DECODE + 1800 * 8e-6, 8)
    assert budget.tokens_beside_decodes(100_000, 8192, 8) < before


@pytest.mark.parametrize("load", [(64, 512, 256, 256), (256, 512, 256, 768)])
def test_a_small_models_prompts_wait_for_no_launching(load: tuple[int, int, int, int]) -> None:
    """On virtual time, with the step costs of a 0.6 B model."""
    full = run_load(QWEN3_06B, *load, patch=fill_steps)
    paced = run_load(QWEN3_06B, *load)
    assert paced.throughput > 0.98 * full.throughput
    assert np.mean(paced.ttft) < 1.15 * np.mean(full.ttft)
    assert np.median(paced.tpot) < 1.05 * np.median(full.tpot)


def test_first_tokens_of_many_long_prompts_are_as_early_as_with_full_steps_and_gaps_half_as_long() -> None:
    """On virtual time, with the step costs of an 8 B model."""
    load = (32, 6000, 256, 96)
    full = run_load(LLAMA_8B, *load, patch=fill_steps)
    paced = run_load(LLAMA_8B, *load)
    assert np.median(paced.ttft) < 1.2 * np.median(full.ttft)
    assert np.percentile(paced.ttft, 99) < 1.1 * np.percentile(full.ttft, 99)
    assert np.percentile(paced.itl, 99) < 0.6 * np.percentile(full.itl, 99)
    assert np.median(paced.tpot) < 1.02 * np.median(full.tpot)
    assert paced.throughput > 0.97 * full.throughput


def test_a_queue_of_long_prompts_beside_many_decodes_does_not_stay() -> None:
    """On virtual time, with the step costs of an 8 B model in FP8: a sequence ends with each long step, and the next
    prompt is computed in one or two of them."""
    found = run_load(LLAMA_8B_FP8, 32, 6000, 256, 96)
    of_a_prompt = 6000 * LLAMA_8B_FP8.token
    assert np.median(found.ttft) < 4 * of_a_prompt
    assert np.percentile(found.itl, 99) < 1.3 * of_a_prompt


def test_a_long_queue_is_worked_off_in_time() -> None:
    assert learned().tokens_beside_decodes(64_000, 8192) == 64_000 // MAX_DRAIN_STEPS


def test_never_more_than_a_step_holds_and_never_too_few_to_be_worth_it() -> None:
    budget = learned()
    assert budget.tokens_beside_decodes(10_000_000, 8192) == 8192
    for _ in range(100):
        budget.record_step(500, DECODE + 500 * 0.01)
    assert budget.tokens_beside_decodes(100, 8192) == MIN_PREFILL_TOKENS


@pytest.mark.parametrize("num_decodes", [1, 16, 64, 200])
def test_a_step_is_filled_up_to_what_it_is_padded_to(num_decodes: int) -> None:
    sizes = (64, 128, 256, 384, 512, 1024)
    for backlog in range(0, 40_000, 1111):
        free, filled = (
            budget.tokens_beside_decodes(backlog, 8192, num_decodes) for budget in (learned(), learned(sizes))
        )
        total = filled + num_decodes
        if free + num_decodes > sizes[-1]:
            assert filled == free, "larger steps are not padded"
        else:
            assert total in sizes
            next_size = min(size for size in sizes if size >= free + num_decodes)
            assert total <= next_size, "no more than the padding would have taken"
            assert filled >= MIN_ROUND_DOWN * free


def test_many_prompts_are_computed_in_steps_of_bounded_length() -> None:
    assert PrefillBudget().tokens_for_many_prompts(8192) == 8192, "nothing is bounded before anything was measured"
    assert learned().tokens_for_many_prompts(8192) == pytest.approx(MAX_PREFILL_SECONDS / TOKEN, rel=0.01)
    assert learned((1024, 2048)).tokens_for_many_prompts(8192, 8) == 2048 - 8
    assert learned().tokens_for_many_prompts(100) == 100, "a step holds no more"
    slow = PrefillBudget()
    for _ in range(50):
        slow.record_step(0, 0.001)
        slow.record_step(500, 500 * 0.01)
    assert slow.tokens_for_many_prompts(8192) == SATURATING_TOKENS, "shorter steps would not be sooner done in all"
    mixture = PrefillBudget(reads=DecodeReads(experts_per_chosen=128 / 8))
    mixture.record_step(0, 0.001)
    mixture.record_step(500, 500 * 0.01)
    most = mixture.tokens_for_many_prompts(8192)
    assert most == SATURATING_EXPERT_ROWS * 16, "each step reads all experts, so it is for many tokens"
    assert mixture.tokens_beside_decodes(500, 8192, 8) <= SATURATING_TOKENS, "one prompt delays decodes no further"


@pytest.mark.parametrize("alone", [True, False])
def test_of_several_prompts_the_first_need_not_wait_for_the_last(alone: bool) -> None:
    engine = Harness(num_blocks=6000, max_num_batched_tokens=8000, max_model_len=20_000)
    sizes = steps_that_take_time(engine)
    for number in range(4):  # what steps cost is learnt from these
        engine.add(f"lesson{number}", [5 + number] * 100, 9)
        engine.run()
    sizes.clear()
    for number in range(1 if alone else 4):
        engine.add(f"prompt{number}", [20 + number] * 4000, 1)
    engine.step(0.0)
    assert (sizes[0] == 4000) == alone
    assert sizes[0] <= 1.05 * MAX_PREFILL_SECONDS / TOKEN or alone


def test_filling_keeps_to_what_a_step_holds() -> None:
    assert learned((128, 4096)).tokens_beside_decodes(1000, 300, 8) <= 300


def test_a_long_prompt_is_cut_while_others_decode_and_whole_otherwise() -> None:
    def longest_chunk(*, with_decode: bool) -> int:
        engine = Harness(num_blocks=600, max_num_batched_tokens=1000, max_model_len=2000)
        chunks = steps_that_take_time(engine)
        for number in range(3):
            engine.add(f"decodes{number}", [1 + number] * 70, 60)
        for _ in range(40):
            engine.step(0.0)
        if not with_decode:
            engine.run()
        for number in range(3):  # what prompts cost is learnt from these
            engine.add(f"lesson{number}", [5 + number] * 100, 1)
            engine.step(0.0)
        engine.add("long", [9] * 900, 1)
        chunks.clear()
        engine.run()
        return max(chunks)

    assert longest_chunk(with_decode=False) == 900
    assert longest_chunk(with_decode=True) <= (MAX_SLOWDOWN_SMALL_BACKLOG - 1) * DECODE / TOKEN + 8, (
        "as the last tokens may"
    )


def test_many_prompts_are_not_held_up_by_a_few_who_decode() -> None:
    engine = Harness(num_blocks=600, max_num_batched_tokens=1000, max_model_len=2000)
    chunks = steps_that_take_time(engine)
    engine.add("decodes", [1] * 70, 60)
    for number in range(3):
        engine.step(0.0)
        engine.add(f"lesson{number}", [5 + number] * 100, 1)
        engine.step(0.0)
    for number in range(4):
        engine.add(f"prompt{number}", [20 + number] * 240, 1)
    chunks.clear()
    engine.step(0.0)
    assert chunks == [1 + SATURATING_TOKENS], "beside decodes there are fewer"
