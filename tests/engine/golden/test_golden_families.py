"""Logits of every family beside Llama's against those of Hugging Face transformers (tests/golden)."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.models.config import load_config
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.rounding import rounded_while_loading
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, bfloat16, float32
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.models.tiny_families import (
    FAMILIES,
    LENGTH,
    MAX_LEN,
    POSITIONS,
    VOCAB,
    build_family,
    prompt,
    tensors,
)
from tests.support.models.tiny_models import TINY_MODELS
from tests.support.paths import GOLDEN

Array = np.ndarray[Any, Any]

# What makes a family a family, undone: the logits must then be far off.
PERTURBATIONS: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_act": "silu"},
    "gemma2": {"attn_logit_softcapping": None},
    "gemma2-uncapped": {"sliding_window": 7},
    "gemma3": {"rope_local_base_freq": 200.0},
    "gemma3-saved": {"final_logit_softcapping": None},
    "granitemoehybrid": {"position_embedding_type": "nope"},
    "olmo3": {"rope_scaling": None},
    "glm": {"partial_rotary_factor": 1.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window_pattern": 2},
    "phi": {"partial_rotary_factor": 1.0},
    "gpt-neox": {"rotary_pct": 0.5},
    "gpt-neox-serial": {"use_parallel_residual": True},
    "gptj": {"rotary_dim": 8},
    "hunyuan-alpha": {"rope_scaling": None},
    "minicpm": {"scale_depth": 1.0},
    "mimo-window": {"sliding_window": 7},
    "opt": {"activation_function": "gelu"},
    "arcee": {"hidden_act": "relu"},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN / "golden_families.npz") as file:
        return dict(file)


OPS = make_ops(CPU)


def logits(folder: Path, dtype: np.dtype[Any] = float32, chunks: list[int] | None = None) -> Array:
    harness = DecoderHarness.of(folder, OPS, dtype, max_model_len=MAX_LEN)
    return harness.logits(prompt(), chunks)[list(POSITIONS), :VOCAB]


def test_every_decoder_has_golden_logits() -> None:
    """Of two configurations or more."""
    decoders = {name for name, entry in ARCHITECTURES.items() if not entry.encoder}
    tested = [*FAMILIES.values(), *(model.config for model in TINY_MODELS.values())]
    counts = Counter(config["architectures"][0] for config in tested)
    assert set(counts) == decoders
    assert min(counts.values()) >= 2, counts


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match(name: str, tmp_path: Path, golden: dict[str, Array]) -> None:
    """Of a whole prompt, and in chunks with single tokens between them."""
    checked = json.dumps(FAMILIES[name]).encode() + b"".join(tensor.tobytes() for tensor in tensors(name).values())
    assert golden[f"{name}/crc32"] == zlib.crc32(checked), "run tests/golden/make_golden_families.py again"
    folder = build_family(name, tmp_path)
    assert relative_error(logits(folder), golden[name]) < 1e-4
    assert relative_error(logits(folder, chunks=[7, 1, 1, 9, 1, LENGTH - 19]), golden[name]) < 1e-4


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "cohere-norms", "hunyuan", "nemotron", "falcon-40b"])
def test_logits_in_bfloat16_are_near(name: str, tmp_path: Path, golden: dict[str, Array]) -> None:
    assert relative_error(logits(build_family(name, tmp_path), bfloat16), golden[name]) < 5e-2


@pytest.mark.parametrize("name", ["falcon-40b", "glm4", "internlm2-biases"])
def test_rows_of_quantised_weights_take_their_places(name: str, tmp_path: Path, golden: dict[str, Array]) -> None:
    folder = build_family(name, tmp_path)
    config = rounded_while_loading(load_config(folder), "fp8", folder)
    made = DecoderHarness(config, load_weights(folder, config, float32, OPS), OPS, float32, max_model_len=MAX_LEN)
    assert relative_error(made.logits(prompt())[list(POSITIONS)], golden[name]) < 0.15


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_golden_logits_tell_families_apart(name: str, tmp_path: Path, golden: dict[str, Array]) -> None:
    assert relative_error(logits(build_family(name, tmp_path, **PERTURBATIONS[name])), golden[name]) > 0.02
