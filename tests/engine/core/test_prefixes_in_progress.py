"""Equal beginnings that arrive together are computed once, and nobody waits without need."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.engine.core.step_batch import StepBatch
from tests.support.fakes.fake_runner import CLIENT, NON_FINITE, Harness, generate

BLOCK_SIZE = 4
PROMPT = [1 + index * 7 % 97 for index in range(150)]
MAX_TOKENS = 3


class CountingHarness(Harness):
    """Counts the prompt tokens that are computed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(num_blocks=512, block_size=BLOCK_SIZE, max_num_seqs=16, **settings)
        self.num_prompt_tokens = 0
        check = self.runner.inspect

        def inspect(batch: StepBatch) -> None:
            check(batch)
            self.num_prompt_tokens += int((batch.positions < len(PROMPT)).sum())

        self.runner.inspect = inspect

    def ask(self, name: str, prompt: list[int] = PROMPT, priority: int = 0, **params: Any) -> None:
        self.add(name, prompt, MAX_TOKENS, ignore_eos=True, priority=priority, **params)


@pytest.mark.parametrize("budget", [1000, 40], ids=["at once", "chunked"])
def test_eight_answers_compute_their_prompt_once(budget: int) -> None:
    engine = CountingHarness(max_num_batched_tokens=budget)
    for index in range(8):
        engine.ask(f"{index}", seed=index)
    engine.run()
    expected = generate(PROMPT, MAX_TOKENS, stop_ids=())
    assert all((engine.token_ids[name], "length") == expected for name in engine.token_ids)
    beyond_full_blocks = len(PROMPT) % BLOCK_SIZE
    assert engine.num_prompt_tokens == len(PROMPT) + 7 * beyond_full_blocks
    assert [engine.last_outputs[str(index)].num_cached_tokens for index in range(8)] == [0] + [148] * 7


def test_without_a_prefix_cache_each_computes_its_own() -> None:
    engine = Harness(num_blocks=512, prefix_caching=False, max_num_batched_tokens=1000)
    for index in range(4):
        engine.add(str(index), PROMPT, 1, ignore_eos=True)
    engine.step()
    assert len(engine.finish_reasons) == 4


def test_others_go_first_while_one_waits_for_a_prefix() -> None:
    engine = CountingHarness(max_num_batched_tokens=60)
    engine.ask("first")
    engine.ask("copy")
    engine.ask("other", [90, 91, 92])
    engine.step()
    engine.step()
    engine.step()
    assert engine.token_ids["other"]
    assert not engine.token_ids["copy"]
    engine.run()
    assert (engine.token_ids["copy"], "length") == generate(PROMPT, MAX_TOKENS, stop_ids=())


def test_a_short_beginning_is_not_waited_for() -> None:
    engine = CountingHarness(max_num_batched_tokens=1000)
    engine.ask("first", PROMPT[:12])
    engine.ask("second", [*PROMPT[:11], 98])
    engine.step()
    assert all(engine.token_ids.values())


def test_a_more_urgent_one_does_not_wait() -> None:
    engine = CountingHarness(max_num_batched_tokens=100)
    engine.ask("first")
    engine.step()
    engine.ask("urgent", priority=-1)
    engine.step()
    assert len(engine.core.scheduler.running) == 2


@pytest.mark.parametrize("way", ["abort", "error"])
def test_when_the_first_is_lost_the_next_one_computes_it(way: str) -> None:
    """The error: a prompt of 14 tokens that begins with this id has no finite logits, see the fake model."""
    prompt = PROMPT if way == "abort" else [NON_FINITE, *range(1, 28)]
    engine = CountingHarness(max_num_batched_tokens=60)
    for name in ("first", "second", "third"):
        engine.ask(name, prompt)
    engine.step()
    if way == "abort":
        assert len(engine.core.scheduler.running) == 1
        engine.core.abort(["first"], CLIENT)
        engine.run()
        assert engine.token_ids["second"] == engine.token_ids["third"] == generate(PROMPT, MAX_TOKENS, stop_ids=())[0]
    else:
        engine.run()
        assert set(engine.finish_reasons.values()) == {"error"}
    assert engine.core.stats().num_used_blocks == 0
    assert not engine.core.scheduler._prefixes._owners


def test_prompts_that_want_logprobs_compute_them_all_but_let_others_share() -> None:
    engine = CountingHarness(max_num_batched_tokens=1000)
    engine.ask("scored", prompt_logprobs=0)
    engine.ask("plain")
    engine.ask("scored too", prompt_logprobs=0)
    engine.run()
    assert engine.num_prompt_tokens == 2 * len(PROMPT) + len(PROMPT) % BLOCK_SIZE
