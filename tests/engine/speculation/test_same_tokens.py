"""With drafts a request gets the tokens that it gets without, from real forwards on the CPU.

The trained model is stories260K, where it is at hand; the others are tiny and random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU
from tests.support.speculation import METHODS, Asked, Told, ask_all, make_core, num_accepted, predicted
from tests.support.tiny_models import TINY_MODELS, build

Runners = Callable[[str], tuple[Path, ModelRunner]]
METHOD_NAMES = ("ngram", "suffix", "auto")


def repeated(seed: int, vocab_size: int, length: int) -> list[int]:
    """A prompt in which whatever comes has come before."""
    rng = random.Random(seed)
    phrase = [rng.randrange(3, vocab_size) for _ in range(7)]
    return [1, *phrase * (length // 7), *phrase[: length % 7]]


def requests(vocab_size: int, max_tokens: int) -> list[Asked]:
    """Greedy and sampled, plain and with every adjustment and filter."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {4: 2.0, 9: -3.0}},
        {"temperature": 0.7, "seed": 11, "top_p": 0.9},
        {"temperature": 0.4, "seed": 12, "top_k": 5, "min_p": 0.05, "logprobs": 0},
        {"temperature": 1.0, "seed": 13, "top_n_sigma": 1.0, "presence_penalty": 1.0, "min_tokens": 9},
        {"temperature": 0.3, "seed": 14, "stop_token_ids": (7, 8)},
        {"temperature": 0.0, "bad_words": ((5, 6), (9,)), "allowed_token_ids": tuple(range(3, 60))},
    ]
    return [
        Asked(repeated(number // 2, vocab_size, 20 + 3 * number), SamplingParams(max_tokens=max_tokens, **each))
        for number, each in enumerate(settings)
    ]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    made: dict[str, tuple[Path, ModelRunner]] = {}

    def runner_of(name: str) -> tuple[Path, ModelRunner]:
        if name not in made:
            folder = build(TINY_MODELS[name], tmp_path_factory.mktemp(name))
            config = EngineConfig(
                model=str(folder),
                block_size=8,
                max_num_seqs=16,
                max_num_batched_tokens=128,
                num_kv_blocks=256,
                speculation="on",
            )
            made[name] = folder, ModelRunner(config, load_config(folder), CPU, make_ops(CPU))
        return made[name]

    return runner_of


def assert_same(told: list[Told], expected: list[Told]) -> None:
    for one, other in zip(told, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.last is not None
        assert other.last is not None
        assert (one.last.finish_reason, one.last.stop_token_id) == (other.last.finish_reason, other.last.stop_token_id)
        assert [each.token_id for each in one.logprobs] == [each.token_id for each in other.logprobs]
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-3)
            assert len(left.top_token_ids) == len(right.top_token_ids)


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_tokens_are_those_without_drafts(runners: Runners, name: str, method: dict[str, Any]) -> None:
    folder, runner = runners(name)
    asked = requests(runner.model.vocab_size, 24)
    expected = ask_all(make_core(folder, runner), asked)
    told = ask_all(make_core(folder, runner, **method), predicted(asked, expected))
    assert_same(told, expected)
    if method["speculation"] == "on":
        assert num_accepted(told) > 40


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_kv_blocks": 14}, id="preempted"),
        pytest.param({"max_num_batched_tokens": 9}, id="chunks of prompts"),
        pytest.param({"max_num_seqs": 1, "num_speculative_tokens": 15}, id="one after the other"),
        pytest.param({"prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_however_they_are_scheduled(runners: Runners, settings: dict[str, Any]) -> None:
    folder, runner = runners("llama")
    asked = requests(runner.model.vocab_size, 20)
    expected = ask_all(make_core(folder, runner), asked)
    core = make_core(folder, runner, speculation="on", **settings)
    told = ask_all(core, predicted(asked, expected), at_once=3)
    assert_same(told, expected)
    assert num_accepted(told) > 40
    assert (core.metrics.num_preemptions > 0) == ("num_kv_blocks" in settings)
    assert core.stats().num_used_blocks == 0


def test_from_the_prefix_cache_and_from_earlier_completions(runners: Runners) -> None:
    folder, runner = runners("llama")
    asked = requests(runner.model.vocab_size, 24)
    core = make_core(folder, runner, speculation="on")
    first = ask_all(core, asked)
    again = ask_all(core, asked)
    assert_same(again, first)
    assert num_accepted(again) > num_accepted(first), "the first completions were looked into"
    assert all(each.last is not None and each.last.num_cached_tokens for each in again)


def test_a_prediction_is_accepted_as_far_as_it_is_right(runners: Runners) -> None:
    folder, runner = runners("llama")
    rng = random.Random(5)
    prompt = [rng.randrange(3, runner.model.vocab_size) for _ in range(20)]
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3)
    [plain] = ask_all(make_core(folder, runner), [Asked(prompt, params)])
    right = plain.token_ids
    wrong = [*right[:12], 3, 3, *right[12:]]
    for prediction, most_steps in ((right, 8), (wrong, 16)):
        core = make_core(folder, runner, speculation="on", speculative_method="ngram", prompt_lookup_min=4)
        [told] = ask_all(core, [Asked(prompt, params, prediction)])
        assert told.token_ids == right
        assert core.num_steps <= most_steps
        assert num_accepted([told]) > 25


def test_one_step_does_not_pass_the_limit_of_tokens(runners: Runners) -> None:
    folder, runner = runners("llama")
    for max_tokens in range(1, 12):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        [told] = ask_all(
            make_core(folder, runner, speculation="on"), [Asked(repeated(0, runner.model.vocab_size, 30), params)]
        )
        assert len(told.token_ids) <= max_tokens


@pytest.mark.shared
@pytest.mark.parametrize("method", METHODS[:2], ids=METHOD_NAMES[:2])
def test_a_trained_model_s_tokens_are_those_without_drafts(shared_models: Path, method: dict[str, Any]) -> None:
    folder = shared_models / "stories260K"
    config = EngineConfig(model=str(folder), block_size=8, max_num_seqs=6, num_kv_blocks=256, speculation="on")
    runner = ModelRunner(config, load_config(folder), CPU, make_ops(CPU))
    asked = requests(512, 24)
    expected = ask_all(make_core(folder, runner), asked)
    assert_same(ask_all(make_core(folder, runner, **method), asked), expected)
