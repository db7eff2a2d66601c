"""Budgets of reasoning: the end is forced on time, ahead of results or not, alone or with a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar, ReasoningBudget, SamplingParams
from tessera.engine.grammar.compiler import GrammarCompiler
from tests.support.grammar_harness import EOS, MODEL, VOCAB_SIZE, GrammarHarness, schema

BEGIN, END = 7, 8  # any two tokens of the vocabulary
OTHERS = tuple(range(100, 140))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


def budget(limit: int, *, opened: bool = True) -> ReasoningBudget:
    return ReasoningBudget(limit, END, None if opened else BEGIN)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 40])
def test_the_end_is_forced_after_the_last_token_of_the_budget(limit: int, asynchronous: bool) -> None:
    harness = GrammarHarness(None, asynchronous=asynchronous)
    answer = harness.answer(reasoning_budget=budget(limit), ignore_eos=True, max_tokens=64, logit_bias={})
    assert answer.token_ids.index(END) == limit
    assert len(answer.token_ids) == 64, "the answer goes on after the reasoning"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_are_constrained_only_near_the_end_of_the_budget(asynchronous: bool) -> None:
    harness = GrammarHarness(None, asynchronous=asynchronous)
    harness.answer(reasoning_budget=budget(50), ignore_eos=True, max_tokens=200)
    assert 1 <= harness.runner.num_masked_rows <= 5


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    harness = GrammarHarness(None)
    params: dict[str, Any] = {"allowed_token_ids": (END,), "ignore_eos": True, "max_tokens": 5}
    assert harness.answer(reasoning_budget=budget(3), **params).token_ids == [END] * 5
    assert harness.runner.num_masked_rows == 5, "by the allowed ids alone"


@pytest.mark.parametrize("first", [(BEGIN,), OTHERS])
def test_only_reasoning_that_begins_has_an_end(first: tuple[int, ...]) -> None:
    """All tokens are of the first kind, so that the reasoning begins at once or never."""
    harness = GrammarHarness(None)
    params: dict[str, Any] = {"allowed_token_ids": first, "ignore_eos": True, "max_tokens": 12}
    answer = harness.answer(reasoning_budget=budget(4, opened=False), **params)
    if first == (BEGIN,):
        assert answer.token_ids[:6] == [BEGIN, *[BEGIN] * 4, END]
    else:
        assert END not in answer.token_ids


def test_budgets_of_a_whole_batch_run_out_independently() -> None:
    harness = GrammarHarness(None, asynchronous=True)
    for limit in range(20):
        harness.add(str(limit), reasoning_budget=budget(limit), ignore_eos=True, max_tokens=30, seed=limit)
    harness.add("free", ignore_eos=True, max_tokens=30)
    answers = harness.run()
    found = [answers[str(limit)].token_ids.index(END) for limit in range(20)]
    assert all(place <= limit for limit, place in enumerate(found))
    assert sum(place == limit for limit, place in enumerate(found)) >= 18, "few end by themselves"
    assert len(answers["free"].token_ids) == 30


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_preempted_sequence_keeps_its_place_in_the_budget(asynchronous: bool) -> None:
    harness = GrammarHarness(None, asynchronous=asynchronous, num_kv_blocks=14, max_num_batched_tokens=64)
    for name in ("first", "second", "third"):
        harness.add(name, reasoning_budget=budget(30), ignore_eos=True, max_tokens=60)
    answers = harness.run()
    assert [answer.token_ids.index(END) for answer in answers.values()] == [30, 30, 30]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_grammar_holds_from_the_forced_end(compiler: GrammarCompiler, asynchronous: bool) -> None:
    harness = GrammarHarness(compiler, asynchronous=asynchronous)
    grammar = schema({"const": "yes"}, start_token_id=END)
    answer = harness.answer(grammar, reasoning_budget=budget(9))
    assert answer.token_ids.index(END) == 9
    assert answer.finish_reason == "stop"
    assert answer.text.endswith('"yes"')


def test_a_grammar_that_has_the_reasoning_in_it_ends_it_too(compiler: GrammarCompiler) -> None:
    """As those of forced tool calls have."""
    harness = GrammarHarness(compiler)
    grammar = Grammar("lark", f'start: thoughts <[{END}]> "yes"\nthoughts: /(.|\\n)*/\n')
    answer = harness.answer(grammar, reasoning_budget=budget(9))
    assert answer.token_ids.index(END) <= 9
    assert answer.text.endswith("yes")


@pytest.mark.parametrize(
    "wrong", [ReasoningBudget(-1, END), ReasoningBudget(1, VOCAB_SIZE), ReasoningBudget(1, END, VOCAB_SIZE)]
)
def test_wrong_budgets_are_refused_by_the_name_of_their_field(wrong: ReasoningBudget) -> None:
    with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
        SamplingParams(max_tokens=1, reasoning_budget=wrong).verify(VOCAB_SIZE)
