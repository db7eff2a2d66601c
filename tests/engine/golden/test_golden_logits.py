"""Every supported architecture's logits against those of Hugging Face transformers (tests/golden)."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.models.decoder import Decoder
from tessera.engine.models.rope import cos_sin_table
from tessera.engine.models.rope_tables import RopeTables
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, bfloat16, float16, float32, from_numpy
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.models.tiny_mixtures import PHIMOE_ROPE
from tests.support.models.tiny_models import PROMPT_LEN, TINY_MODELS, TinyModel, build, prompt
from tests.support.paths import GOLDEN

GOLDEN_FILE = GOLDEN / "golden_logits.npz"
TOLERANCE = {float32: 1e-4, bfloat16: 2e-2, float16: 5e-3}

# What makes a variant a variant, undone: the logits must then be far off.
PERTURBATIONS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 90.0},
    "llama-linear": {"rope_scaling": None},
    "llama-dynamic": {"rope_scaling": None},
    "llama-llama3": {"rope_scaling": None},
    "llama-yarn": {"rope_scaling": None},
    "mistral-window": {"sliding_window": 9},
    "qwen2-window": {"max_window_layers": 3},
    "smollm3": {"no_rope_layers": [1, 1, 1, 1]},
    "smollm3-window": {"sliding_window": 9},
    "phi3-partial-window": {"partial_rotary_factor": 1.0},
    "phi3-longrope-short": {"original_max_position_embeddings": 16},
    "phi3-longrope-long": {"original_max_position_embeddings": 64},
    "llama-gelu": {"hidden_act": "silu"},
    "ministral-pattern": {"layer_types": ["sliding_attention"] * 3},
    "starcoder2-window": {"sliding_window": 9},
    "stablelm": {"partial_rotary_factor": 0.5},
    "stablelm-parallel": {"partial_rotary_factor": 1.0},
    "granite": {"residual_multiplier": 0.5},
    "granite-tied": {"embedding_multiplier": 1.0},
    "exaone4": {"sliding_window_pattern": 3},
    "exaone4-full": {"sliding_window": 64},
    "gpt2": {"activation_function": "gelu"},
    "gpt2-variants": {"scale_attn_by_inverse_layer_idx": False},
    "mixtral-window": {"num_experts_per_tok": 2},
    "qwen2moe": {"norm_topk_prob": True},
    "qwen3moe": {"norm_topk_prob": False},
    "granitemoe": {"num_experts_per_tok": 3},
    "phimoe": {"router_jitter_noise": 0.3},
    "phimoe-longrope": {"rope_scaling": {**PHIMOE_ROPE, "short_mscale": 1.0, "long_mscale": 1.0}},
    "glm4moe": {"routed_scaling_factor": 1.0},
    "glm4moe-groups": {"topk_group": 4},
    "olmoe": {"norm_topk_prob": True},
    "dots1": {"norm_topk_prob": False},
    "dots1-window": {"sliding_window": 9},
    "ernie4_5-moe": {"moe_k": 2},
    "gptoss": {"sliding_window": 9},
    "gptoss-mxfp4": {"num_experts_per_tok": 3},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(GOLDEN_FILE) as file:
        return dict(file)


def harness(model: TinyModel, folder: Path, dtype: np.dtype[Any] = float32) -> DecoderHarness:
    return DecoderHarness.of(build(model, folder), make_ops(CPU), dtype, max_model_len=model.max_model_len)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_model_is_the_one_the_golden_logits_were_made_from(
    name: str, tmp_path: Path, golden: dict[str, np.ndarray[Any, Any]]
) -> None:
    digest = hashlib.sha256()
    for path in sorted(build(TINY_MODELS[name], tmp_path / name).iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert golden[f"{name}/sha256"].tobytes() == digest.digest(), "run tests/golden/make_golden_logits.py again"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_match(name: str, dtype: np.dtype[Any], tmp_path: Path, golden: dict[str, np.ndarray[Any, Any]]) -> None:
    logits = harness(TINY_MODELS[name], tmp_path, dtype).logits(prompt())
    assert logits.dtype == float32
    assert relative_error(logits[golden["positions"]], golden[name]) < TOLERANCE[dtype]


@pytest.mark.parametrize("chunks", [[1] * PROMPT_LEN, [7, 1, 16, 9, 7], [PROMPT_LEN - 1, 1]], ids=str)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_chunks_and_decoding_through_the_paged_cache_change_nothing(
    name: str, chunks: list[int], tmp_path: Path, golden: dict[str, np.ndarray[Any, Any]]
) -> None:
    logits = harness(TINY_MODELS[name], tmp_path).logits(prompt(), chunks)
    assert relative_error(logits[golden["positions"]], golden[name]) < 1e-4


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_golden_logits_tell_variants_apart(name: str, tmp_path: Path, golden: dict[str, np.ndarray[Any, Any]]) -> None:
    model = TINY_MODELS[name]
    changed = dataclasses.replace(model, config={**model.config, **PERTURBATIONS[name]})
    logits = harness(changed, tmp_path).logits(prompt())
    # The two forms of GELU differ by little, but by twice the tolerance.
    least = 2e-4 if name == "gpt2" else 0.05
    assert relative_error(logits[golden["positions"]], golden[name]) > least


def test_golden_logits_notice_a_wrong_rope_table(tmp_path: Path, golden: dict[str, np.ndarray[Any, Any]]) -> None:
    """A table of interleaved instead of half-split pairs is the classic mistake."""
    made = harness(TINY_MODELS["llama"], tmp_path)
    table = cos_sin_table(made.config.ropes[0], 64)
    half = table.shape[1] // 2
    swapped = np.concatenate([table[:, half:], table[:, :half]], axis=1)
    old = made.decoder
    made.decoder = Decoder(old.config, old.weights, old.ops, old.caches, RopeTables((from_numpy(swapped, CPU),), 0))
    assert relative_error(made.logits(prompt())[golden["positions"]], golden["llama"]) > 0.1


def test_sequences_of_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    made = harness(TINY_MODELS["llama"], tmp_path)
    alone = made.logits(prompt())
    made.logits(prompt()[::-1])
    assert np.array_equal(made.logits(prompt()), alone)
