"""Log-probabilities of prompts' own tokens: right however a prompt is cut into steps, and asked for once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, rows_of
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import PromptRows
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CpuDevice, float32
from tests.support.cases.token_ids import token_ids
from tests.support.decoder_harness import DecoderHarness, int32
from tests.support.fakes.fake_runner import Harness, score
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.references.llama_reference import log_softmax

CLIENT = b"client"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray[Any, Any]:
    """Log-probabilities [tokens, V] after each of the prompt's tokens."""
    harness = DecoderHarness.of(folder, make_ops(CpuDevice()), float32, max_model_len=64)
    return log_softmax(harness.logits(prompt()[:30]).astype(np.float64))


def make_core(folder: Path, **settings: Any) -> EngineCore:
    device = CpuDevice()
    config = EngineConfig(model=str(folder), **{"block_size": 8, "max_num_seqs": 4, "num_kv_blocks": 64, **settings})
    model = load_config(folder)
    runner = ModelRunner(config, model, device, make_ops(device))
    return EngineCore(
        config.with_device_defaults("cpu"),
        runner,
        vocab_size=model.vocab_size,
        max_model_len=64,
        num_kv_blocks=runner.num_kv_blocks,
        eos_token_ids=[],
    )


def outputs_of(core: EngineCore) -> Iterator[Any]:
    for _ in range(1000):
        if not core.has_work:
            return
        yield from core.step().get(CLIENT, [])
    raise AssertionError("the core does not come to an end")


@pytest.mark.parametrize("budget", [1024, 7, 4], ids=["whole", "chunked", "smallest chunks"])
def test_they_are_the_log_softmax_of_the_models_logits(
    folder: Path, expected: np.ndarray[Any, Any], budget: int
) -> None:
    """Also beside a neighbour, and in pieces: the logits buffer has four rows."""
    core = make_core(folder, max_num_batched_tokens=budget)
    tokens = prompt()[:30]
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=3)
    core.add_request(AddRequest("scored", token_ids(tokens), params, 0.0), CLIENT)
    core.add_request(AddRequest("other", token_ids(tokens[::-1]), SamplingParams(max_tokens=3), 0.0), CLIENT)
    outputs = [output for output in outputs_of(core) if output.request_id == "scored"]
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]
    found = rows_of(outputs[0].prompt_logprobs)
    assert [entry.token_id for entry in found] == tokens[1:]
    for entry, row in zip(found, expected, strict=False):
        order = np.argsort(-row, kind="stable")
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert entry.top_token_ids == order[:3].tolist()
        np.testing.assert_allclose(entry.top_logprobs, row[order[:3]], atol=2e-4)
    sampled = outputs[0].logprobs[0]
    assert sampled.token_id == outputs[0].token_ids[0] == expected[-1].argmax(), "sampling comes after, undisturbed"
    assert sampled.logprob == pytest.approx(expected[-1].max(), abs=2e-4)


def test_the_whole_vocabulary_of_one_prompt_beside_a_few_of_another(
    folder: Path, expected: np.ndarray[Any, Any]
) -> None:
    vocab_size = expected.shape[1]
    core = make_core(folder)
    tokens = prompt()[:30]
    for name, count in (("few", 2), ("all", vocab_size), ("none", 0)):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=count)
        core.add_request(AddRequest(name, token_ids(tokens), params, 0.0), CLIENT)
    found = {output.request_id: rows_of(output.prompt_logprobs) for output in outputs_of(core)}
    assert [len(entry.top_token_ids) for entry in found["few"]] == [2] * 29
    assert [len(entry.top_token_ids) for entry in found["none"]] == [0] * 29
    for entry, row in zip(found["all"], expected, strict=False):
        assert sorted(entry.top_token_ids) == list(range(vocab_size))
        np.testing.assert_allclose(entry.top_logprobs, row[entry.top_token_ids], atol=2e-4)


def test_a_cached_prefix_is_computed_again_for_it() -> None:
    engine = Harness()
    tokens = list(range(1, 31))
    engine.add("first", tokens, 2, ignore_eos=True)
    engine.run()
    engine.add("scored", tokens, 2, ignore_eos=True, prompt_logprobs=1)
    engine.add("plain", tokens, 2, ignore_eos=True)
    engine.run()
    assert engine.prompt_logprobs.keys() == {"scored"}
    assert engine.prompt_logprobs["scored"] == [score(np.array(tokens[:end]), tokens[end], 1) for end in range(1, 30)]
    assert engine.last_outputs["scored"].num_cached_tokens == 0
    assert engine.last_outputs["plain"].num_cached_tokens == 28


def test_a_prompt_of_one_token_has_none() -> None:
    engine = Harness()
    engine.add("one", [5], 2, ignore_eos=True, prompt_logprobs=3)
    engine.run()
    assert engine.prompt_logprobs == {"one": []}


def test_a_preempted_prompt_is_not_scored_twice() -> None:
    """Five blocks for two sequences of up to four each: the second is preempted and finds its place again."""
    engine = Harness(num_blocks=5, block_size=4, max_num_batched_tokens=6)
    prompts = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [11, 12, 13, 14, 15, 16, 17]}
    asked: list[PromptRows] = []
    write = engine.runner.inspect

    def inspect(batch: Any) -> None:
        write(batch)
        if batch.prompt_rows is not None:
            asked.append(batch.prompt_rows)

    engine.runner.inspect = inspect
    for name, tokens in prompts.items():
        engine.add(name, tokens, 8, ignore_eos=True, prompt_logprobs=0)
    engine.run()
    assert engine.core.metrics.num_preemptions > 0
    for name, tokens in prompts.items():
        assert engine.prompt_logprobs[name] == [score(np.array(tokens[:end]), tokens[end], 0) for end in range(1, 7)]
    assert sorted(np.concatenate([rows.next_token_ids for rows in asked]).tolist()) == sorted(
        int32([*prompts["a"][1:], *prompts["b"][1:]]).tolist()
    )
