"""The kind of row in which a token is computed: what a sequence is, not what else is in the step, decides on it.

The fake runner notices every token that a sequence reads and that was computed in the wrong kind. The worlds of
`test_core_simulation.py` have it, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from tessera.engine.core.step_batch import StepBatch
from tests.support.fakes.fake_runner import Harness, generate

BLOCK_SIZE = 4


def prompt_of(first: int, length: int) -> list[int]:
    return [first + number % 20 for number in range(length)]


def rows_of(engine: Harness) -> list[list[int]]:
    """Of the last step: each row's number of tokens, and its length with them."""
    batch = engine.runner.last_batch
    assert isinstance(batch, StepBatch)
    return [np.diff(batch.cu_seqlens_q).tolist(), batch.context_lens.tolist()]


def test_a_prompts_last_token_is_a_row_of_its_own() -> None:
    engine = Harness(batch_invariant=True)
    engine.add("a", prompt_of(1, 9), 2, ignore_eos=True)
    engine.add("b", [5], 2, ignore_eos=True)
    engine.step()
    assert rows_of(engine) == [[8, 1, 1], [8, 9, 1]]
    engine.step()
    assert rows_of(engine) == [[1, 1], [10, 2]]


def test_a_lone_token_of_a_prompt_takes_the_one_before_it_along() -> None:
    engine = Harness(batch_invariant=True, max_num_seqs=2, max_num_batched_tokens=3)
    engine.add("a", prompt_of(1, 9), 2, ignore_eos=True)
    engine.add("decodes", [7], 12, ignore_eos=True)
    seen = []
    while engine.core.has_work:
        engine.step()
        batch = engine.runner.last_batch
        assert batch is not None
        seen += np.diff(batch.cu_seqlens_q)[batch.context_lens > 1].tolist()
        assert (batch.slot_mapping < 0).sum() == 0 or 2 in np.diff(batch.cu_seqlens_q)
    assert engine.token_ids["a"] == generate(prompt_of(1, 9), 2, stop_ids=())[0]
    assert set(seen) <= {1, 2, 3}


def test_a_draft_is_one_row_where_nothing_but_drafts_is_in_the_step() -> None:
    """Whose tokens attention computes as if each was a row; beside prompts they are."""
    engine = Harness(
        batch_invariant=True,
        max_num_batched_tokens=12,
        speculation="on",
        speculative_method="ngram",
        num_speculative_tokens=3,
        prompt_lookup_min=1,
    )
    engine.add("drafts", prompt_of(1, 40), 30, ignore_eos=True)
    alone, beside = 0, 0
    for number in range(200):
        if number == 8:
            engine.add("prompt", prompt_of(3, 40), 2, ignore_eos=True)
        if not engine.core.has_work:
            break
        engine.step()
        batch = engine.runner.last_batch
        assert batch is not None
        if batch.verifies:
            alone += 1
            assert batch.num_seqs == batch.rounds[0]
        elif batch.rounds:
            beside += 1
            assert batch.num_seqs >= batch.num_sampled, "each token of a draft is a row"
    assert alone > 3
    assert beside > 0


def test_the_next_turn_shares_the_prompts_blocks_and_not_those_of_the_answer() -> None:
    engine = Harness(batch_invariant=True)
    first = prompt_of(1, 4 * BLOCK_SIZE)
    engine.add("first", first, 4 * BLOCK_SIZE, ignore_eos=True)
    engine.run()
    engine.add("again", first, 4, ignore_eos=True)
    engine.run()
    assert engine.last_outputs["again"].num_cached_tokens == 3 * BLOCK_SIZE
    second = [*first, *engine.token_ids["first"], 9, 8, 7]
    engine.add("second", second, 4, ignore_eos=True)
    engine.run()
    # The last block of the first prompt has its last token, which is a row of its own there.
    assert engine.last_outputs["second"].num_cached_tokens == 3 * BLOCK_SIZE
    assert engine.token_ids["second"] == generate(second, 4, stop_ids=())[0]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_preempted_sequence_computes_its_own_tokens_one_row_each(prefix_caching: bool) -> None:
    engine = Harness(
        batch_invariant=True, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=32, prefix_caching=prefix_caching
    )
    requests = {f"r{index}": prompt_of(1 + index, 5 + index) for index in range(5)}
    for name, prompt in requests.items():
        engine.add(name, prompt, 18, ignore_eos=True)
    most = 0
    while engine.core.has_work:
        engine.step()
        batch = engine.runner.last_batch
        assert batch is not None
        most = max(most, batch.num_seqs)
    assert most > 3, "nothing was computed again"
    for name, prompt in requests.items():
        assert engine.token_ids[name] == generate(prompt, 18, stop_ids=())[0]


def test_prompt_logprobs_are_of_the_right_tokens() -> None:
    """Also of tokens that were computed before and come along."""
    found = []
    for batch_invariant in (False, True):
        engine = Harness(batch_invariant=batch_invariant, max_num_seqs=2, max_num_batched_tokens=3)
        engine.add("decodes", [7], 12, ignore_eos=True)
        engine.add("a", prompt_of(1, 9), 2, ignore_eos=True, prompt_logprobs=2)
        engine.run()
        found.append(engine.prompt_logprobs["a"])
    assert found[0] == found[1]
