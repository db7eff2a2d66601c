"""Drafts of constrained completions: masks behind each draft token, and texts that a grammar forces drafted at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.sampling_params import Grammar, ReasoningBudget
from tessera.engine.contract.speculation.settings import FOLDER_METHODS, MODEL_METHODS
from tessera.engine.grammar.compiler import GrammarCompiler
from tests.support.grammar_harness import EOS, MODEL, VOCAB_SIZE, GrammarHarness, schema

PERSON = {
    "type": "object",
    "properties": {
        "identification_number": {"type": "integer"},
        "description": {"enum": ["something long that is forced", "something else that is forced as well"]},
        "is_registered": {"type": "boolean"},
    },
    "required": ["identification_number", "description", "is_registered"],
    "additionalProperties": False,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "schema": {"grammar": schema(PERSON)},
    "schema again": {"grammar": schema(PERSON), "seed": 4},
    "regex": {"grammar": Grammar("regex", "The answer to this question is (yes|no), (for sure|perhaps)\\.")},
    "choice": {"grammar": Grammar("choice", json.dumps(["the first of all", "the first of many", "another one"]))},
    "allowed": {"allowed_token_ids": (5, 6, 7), "max_tokens": 40},
    "bad words": {"allowed_token_ids": (5, 6, 7), "bad_words": ((5, 6), (7, 7, 7)), "max_tokens": 40},
    "budget": {"reasoning_budget": ReasoningBudget(11, end_token_id=9), "max_tokens": 40},
    "budget of few": {"allowed_token_ids": (5, 9), "reasoning_budget": ReasoningBudget(7, 9), "max_tokens": 30},
    "none": {"max_tokens": 40},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Path(MODEL), VOCAB_SIZE, [EOS])
    yield made
    made.close()


def answers(compiler: GrammarCompiler, **settings: Any) -> tuple[dict[str, Any], GrammarHarness]:
    harness = GrammarHarness(compiler, **settings)
    for name, params in REQUESTS.items():
        harness.add(name, **params)
    return {name: (each.token_ids, each.finish_reason, each.error) for name, each in harness.run().items()}, harness


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("method", ["ngram", "suffix", *MODEL_METHODS])
def test_constrained_completions_are_those_without_drafts(
    compiler: GrammarCompiler, method: str, asynchronous: bool
) -> None:
    expected, _ = answers(compiler, asynchronous=asynchronous)
    found, harness = answers(
        compiler,
        asynchronous=asynchronous,
        speculation="on",
        speculative_method=method,
        speculative_model="noise" if method in FOLDER_METHODS else None,
        prompt_lookup_min=1,
    )
    assert found == expected
    assert harness.core.metrics.speculator is not None
    assert harness.core.metrics.speculator.num_accepted_tokens > 10


def test_what_a_grammar_forces_takes_few_steps(compiler: GrammarCompiler) -> None:
    text = "All of this sentence is forced by the expression, from the first word to the last: (yes|no)"
    plain = GrammarHarness(compiler)
    expected = plain.answer(Grammar("regex", text))
    jumping = GrammarHarness(compiler, speculation="on", num_speculative_tokens=16)
    assert jumping.answer(Grammar("regex", text)).text == expected.text
    assert jumping.core.num_steps < plain.core.num_steps
