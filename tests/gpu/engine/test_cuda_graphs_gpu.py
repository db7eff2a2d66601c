"""A CUDA graph gives, replay after replay, the very bits that its kernels give when launched one by one.

In a recording kernels start while those before them end, which only shows where what they read is not yet written,
or is still in a cache as it was: so every shape is replayed many times, over several layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.models.config import load_config
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.runner.cuda_graphs import StepGraph
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.step_inputs import StepShape
from tests.support.decoder_harness import Row, as_verification, step_batch

pytestmark = pytest.mark.gpu

REPLAYS = 20
PARTS = 4  # which processes may share
BLOCK_SIZE: Final = 16
BLOCKS_PER_SEQ = 140
MAX_NUM_SEQS = 40
DRAFT_TOKENS = 7
MODELS: dict[str, dict[str, Any]] = {
    "heads of 128": {
        "hidden_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1024,
    },
    "heads of 32": {
        "hidden_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "intermediate_size": 512,
    },
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "vocab_size": 2560,
    "max_position_embeddings": BLOCKS_PER_SEQ * BLOCK_SIZE,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", params=MODELS)
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cuda_device: CudaDevice, cuda_ops: CudaOps
) -> ModelRunner:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **MODELS[request.param]}))
    return make_runner(folder, cuda_device, cuda_ops)


def make_runner(folder: Path, device: Any, ops: Any) -> ModelRunner:
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        num_kv_blocks=MAX_NUM_SEQS * BLOCKS_PER_SEQ,
        speculation="on",
        num_speculative_tokens=DRAFT_TOKENS,
    )
    return ModelRunner(config, load_config(folder), device, ops)


def batch_of(shape: StepShape, max_context_len: int, rng: np.random.Generator) -> StepBatch:
    """Rows that the shape is the smallest for: decodes, tokens with drafts, or prompts beside decodes; one of them as
    long as may be."""
    if shape.verifies:
        num_rows = max(min(shape.num_tokens // 3, MAX_NUM_SEQS), 1)
        counts = [len(part) for part in np.array_split(np.arange(shape.num_tokens), num_rows)]
    else:
        num_rows = shape.num_seqs if shape.is_decode else min(shape.num_seqs - 1, MAX_NUM_SEQS)
        counts = [1] * num_rows
        if not shape.is_decode:
            counts[0] = shape.num_tokens - num_rows + 1
    rows = []
    longest = min(max_context_len, BLOCKS_PER_SEQ * BLOCK_SIZE - 1)
    for slot, count in enumerate(counts):
        context = int(rng.integers(count, longest)) if slot else longest
        row = Row(
            slot=slot,
            blocks=list(range(slot * BLOCKS_PER_SEQ, (slot + 1) * BLOCKS_PER_SEQ)),
            prompt=rng.integers(3, 2560, context).tolist(),
            params=SamplingParams(max_tokens=8, temperature=0.0),
        )
        row.num_computed = context - count
        rows.append(row)
    batch = step_batch(rows, BLOCK_SIZE)
    return as_verification(batch) if shape.verifies else batch


def fill_cache(runner: ModelRunner) -> None:
    """Contexts of finite numbers, whatever was there before."""
    for layer in runner.decoder.caches:
        for tensor in layer:
            runner.ops.fill_normal(tensor, std=1.0, seed=3)


def steps_of(runner: ModelRunner) -> list[tuple[int, StepGraph]]:
    """And how long their rows may be."""
    recorded = runner._graphs
    steps = [(runner.max_model_len, step) for step in recorded._steps.values()]
    return steps + [(SHORT_CONTEXT, step) for step in recorded._short_steps.values()]


@pytest.mark.parametrize("part", range(PARTS))
def test_replays_give_the_bits_of_single_launches(part: int, runner: ModelRunner) -> None:
    rng = np.random.default_rng(11 + part)
    print(f"seed {11 + part}")
    fill_cache(runner)
    steps = steps_of(runner)[part::PARTS]
    assert steps, "no step was recorded"
    for max_context_len, step in steps:
        shape = step.inputs.shape
        batch = batch_of(shape, max_context_len, rng)
        assert runner._graphs.find(batch) is step, shape
        runner._submit(step.inputs, batch)
        expected = runner._forward(step.inputs).numpy()[: batch.num_sampled].copy()
        assert np.isfinite(expected).all(), shape
        for replay in range(REPLAYS):
            step.graph.launch()
            found = step.logits.numpy()[: batch.num_sampled]
            assert np.array_equal(found, expected), (
                f"{shape}, replay {replay}: {(found != expected).sum()} logits differ"
            )
