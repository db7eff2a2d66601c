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
from tests.support.speculation import (
    METHODS,
    Asked,
    ask_all,
    assert_same,
    make_core,
    num_accepted,
    predicted,
    repeated,
    varied_requests,
)
from tests.support.tiny_models import TINY_MODELS, build

Runners = Callable[[str], tuple[Path, ModelRunner]]
METHOD_NAMES = ("ngram", "suffix", "auto")


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


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_tokens_are_those_without_drafts(runners: Runners, name: str, method: dict[str, Any]) -> None:
    folder, runner = runners(name)
    asked = varied_requests(runner.model.vocab_size, 24)
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
    asked = varied_requests(runner.model.vocab_size, 20)
    expected = ask_all(make_core(folder, runner), asked)
    core = make_core(folder, runner, speculation="on", **settings)
    told = ask_all(core, predicted(asked, expected), at_once=3)
    assert_same(told, expected)
    assert num_accepted(told) > 40
    assert (core.metrics.num_preemptions > 0) == ("num_kv_blocks" in settings)
    assert core.stats().num_used_blocks == 0


def test_from_the_prefix_cache_and_from_earlier_completions(runners: Runners) -> None:
    folder, runner = runners("llama")
    asked = varied_requests(runner.model.vocab_size, 24)
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
    asked = varied_requests(512, 24)
    expected = ask_all(make_core(folder, runner), asked)
    assert_same(ask_all(make_core(folder, runner, **method), asked), expected)
