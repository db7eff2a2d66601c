"""A KV cache in FP8: its size, its error, and the scales that a checkpoint brings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import KVFormat
from tessera.engine.formats.fp8 import E4M3_VALUES
from tessera.engine.models.config import load_config
from tessera.engine.models.kv_cache import block_bytes
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner, resolve_kv_format
from tessera.engine.tensor import CPU, bfloat16, float32, uint8
from tests.support.cases.quantisers import SCHEMES, pack_tensors, quantised_model, write_tensors
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.models.tiny_models import TINY_MODELS, build, make_tensors, prompt, write_safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(TINY_MODELS["llama"], tmp_path / "llama")


def with_scales(folder: Path, scales: dict[str, Any]) -> Path:
    """The model with these tensors in its first layer's attention."""
    extras = {f"model.layers.0.self_attn.{name}": np.asarray(value, np.float32) for name, value in scales.items()}
    write_safetensors(folder / "model.safetensors", {**make_tensors(TINY_MODELS["llama"]), **extras})
    return folder


def harness(folder: Path, kv_dtype: np.dtype[Any]) -> DecoderHarness:
    return DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=64, kv_dtype=kv_dtype)


def test_it_takes_half_of_what_16_bits_take(folder: Path) -> None:
    model = load_config(folder)
    assert 2 * block_bytes(model, 8, KVFormat(uint8)) == block_bytes(model, 8, KVFormat(bfloat16))
    config = EngineConfig(
        model=str(folder),
        kv_cache_dtype="fp8",
        block_size=8,
        max_num_seqs=64,
        cpu_kv_cache_gib=20.5 * block_bytes(model, 8, KVFormat(float32)) / 2**30,
    )
    assert ModelRunner(config, model, CPU, make_ops(CPU)).num_kv_blocks == 4 * 20 + 2


def test_logits_are_near_those_of_a_whole_cache(folder: Path) -> None:
    exact, rounded = (harness(folder, dtype).logits(prompt()) for dtype in (float32, uint8))
    assert 1e-4 < relative_error(rounded, exact) < 0.1


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_scales_of_a_checkpoint_are_used(names: tuple[str, str], folder: Path) -> None:
    """Of one head each, or one for all: the cache holds the quotients."""
    found = with_scales(folder, {names[0]: [0.01, 0.02], names[1]: 0.03})
    attention = load_weights(found, load_config(found), float32, make_ops(CPU)).layers[0].attention
    assert attention.kv_scales is not None
    np.testing.assert_allclose(attention.kv_scales.numpy(), [[0.01, 0.02], [0.03, 0.03]])

    exact, scaled = harness(found, float32), harness(found, uint8)
    for cache in (*exact.decoder.caches[0], *scaled.decoder.caches[0]):
        cache.numpy()[...] = 0
    assert relative_error(scaled.logits(prompt()), exact.logits(prompt())) < 0.1
    for kind, scales in enumerate(([0.01, 0.02], [0.03, 0.03])):
        whole, codes = (made.decoder.caches[0][kind].numpy() for made in (exact, scaled))
        assert relative_error(E4M3_VALUES[codes] * np.array(scales, np.float32)[:, None, None], whole) < 0.0625


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("fp8-tensor", ("k_scale", "v_scale")),
        ("fp8-static", ("k_proj.output_scale", "v_proj.output_scale")),
        ("modelopt", ("k_proj.k_scale", "v_proj.v_scale")),
    ],
)
def test_scales_of_quantised_checkpoints_are_found(
    scheme: str, names: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the names that compressed-tensors, AutoFP8 and ModelOpt give them."""
    found, _ = quantised_model(tmp_path, SCHEMES[scheme])
    tensors, _ = pack_tensors(make_tensors(replace(TINY_MODELS["llama"], prefix="")), SCHEMES[scheme])
    prefix = "model.layers.1.self_attn."
    scales = {f"{prefix}{name}": np.full(1, value, np.float32) for name, value in zip(names, (0.5, 0.25), strict=True)}
    write_tensors(found / "model.safetensors", {**tensors, **scales})
    first, second, *_ = load_weights(found, load_config(found), float32, make_ops(CPU)).layers
    assert first.attention.kv_scales is None
    assert second.attention.kv_scales is not None
    np.testing.assert_array_equal(second.attention.kv_scales.numpy(), [[0.5, 0.5], [0.25, 0.25]])
    assert not caplog.records, "no tensor is left out"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": [1.0, 1.0, 1.0], "v_scale": 1.0}, r"self_attn\.k_scale has 3 numbers, not 1 or 2"),
        ({"k_scale": 1.0, "v_scale": 0.0}, r"self_attn\.v_scale has a scale that is not positive"),
    ],
)
def test_scales_that_make_no_sense_are_refused(scales: dict[str, Any], message: str, folder: Path) -> None:
    found = with_scales(folder, scales)
    with pytest.raises(ModelError, match=message):
        load_weights(found, load_config(found), float32, make_ops(CPU))


def test_a_gpu_that_cannot_convert_is_named() -> None:
    device = object.__new__(CudaDevice)
    device.name, device.arch, device.compute_capability = "cuda:0", "80", (8, 0)
    config = EngineConfig(model="x", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs a GPU from sm_89 on, and cuda:0 is sm_80"):
        resolve_kv_format(config, bfloat16, device)
    device.compute_capability = (8, 9)
    assert resolve_kv_format(config, bfloat16, device).dtype == uint8
