"""Tiny models in every scheme against the numbers that their tensors stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import Fp8Format
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import MoEWeights, Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.cases.op_cases import Array
from tests.support.cases.quantisers import SCHEMES, Packed, fp8, quantised_model
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.models.tiny_models import prompt


def weights_of(folder: Path) -> Weights:
    return load_weights(folder, load_config(folder), float32, make_ops(CPU))


def logits(folder: Path) -> Array:
    return DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=64).logits(prompt())


def numbers(weights: Weights) -> list[Array]:
    """Of each matrix, with columns in the model's order."""
    found = []
    for weight in weights.linear_weights():
        arrays = [{name: tensor.numpy() for name, tensor in part.tensors.items()} for part in weight.parts]
        rows = [part.format.dequantize(a, slice(None)) for part, a in zip(weight.parts, arrays, strict=True)]
        stored = np.concatenate(rows)
        if weight.order is not None:
            stored[:, weight.order.numpy()] = stored.copy()
        found.append(stored)
    return found


FUSED = ("w4a16-actorder", "deepseek", "fp8-tensor", "awq", "mlx")


@pytest.mark.parametrize(
    ("name", "base"), [*((name, "llama") for name in SCHEMES), *((name, "phi3") for name in FUSED)]
)
def test_a_model_has_the_numbers_that_its_tensors_stand_for(name: str, base: str, tmp_path: Path) -> None:
    """Every bit of them, except for the sum of MLX's scale and offset; phi3's matrices are stored fused."""
    quantised, exact = quantised_model(tmp_path, SCHEMES[name], base)
    loaded = weights_of(quantised)
    for found, expected in zip(numbers(loaded), numbers(weights_of(exact)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-7 if name == "mlx" else 0)
    assert loaded.nbytes < weights_of(exact).nbytes / 1.5


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_runs(name: str, tmp_path: Path) -> None:
    quantised, exact = quantised_model(tmp_path, SCHEMES[name])
    error = relative_error(logits(quantised), logits(exact))
    if SCHEMES[name].rounds_input:
        assert 1e-4 < error < 0.15
    else:
        assert error < 2e-5


# Of mixtures: schemes whose experts stay as they are stored, and those whose experts are dequantised.
EXPERTS_STAY = ("w4a16-asymmetric", "w8a8", "fp8-tensor", "fp8-channel", "deepseek", "modelopt", "awq", "gptq")
EXPERTS_BECOME_DENSE = ("w4a16-actorder", "gptq-actorder")
ROUTERS = ("lm_head", "mlp.gate", "block_sparse_moe.gate")


@pytest.mark.parametrize(
    ("name", "base"), [*((name, "qwen3moe") for name in (*EXPERTS_STAY, *EXPERTS_BECOME_DENSE)), ("awq", "mixtral")]
)
def test_experts_have_the_numbers_that_their_tensors_stand_for(
    name: str, base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, exact = quantised_model(tmp_path, SCHEMES[name], base, plain=ROUTERS)
    calls: list[tuple[int, int]] = []
    loaded = load_weights(quantised, load_config(quantised), float32, make_ops(CPU), lambda *done: calls.append(done))
    for found, expected in zip(numbers(loaded), numbers(weights_of(exact)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-7)
    becomes_dense = name in EXPERTS_BECOME_DENSE
    for layer in loaded.layers:
        assert isinstance(layer.mlp, MoEWeights)
        assert (layer.mlp.up.dense is not None) == becomes_dense
    assert ("its experts as they are stored: they are dequantised to float32" in caplog.text) == becomes_dense
    assert calls[-1][0] == calls[-1][1]
    if not SCHEMES[name].rounds_input:  # which changes the choice of experts
        assert relative_error(logits(quantised), logits(exact)) < 2e-5


def test_experts_may_differ_in_the_scales_of_activations(tmp_path: Path) -> None:
    scales = iter(range(1, 10**6))

    def pack(w: Array) -> Packed:
        tensors, values = SCHEMES["modelopt"].pack(w)
        return {**tensors, "input_scale": np.array(0.01 * next(scales), np.float32)}, values

    scheme = replace(SCHEMES["modelopt"], pack=pack)
    quantised, exact = quantised_model(tmp_path, scheme, "qwen3moe", plain=(*ROUTERS, "self_attn"))
    mixture = weights_of(quantised).layers[0].mlp
    assert isinstance(mixture, MoEWeights)
    assert mixture.up.parts[0].format == Fp8Format(None, rounds_input=False)
    assert relative_error(logits(quantised), logits(exact)) < 2e-5


def test_experts_whose_rows_are_no_whole_blocks_are_dequantised(tmp_path: Path) -> None:
    scheme = replace(SCHEMES["deepseek"], config={**SCHEMES["deepseek"].config, "weight_block_size": [48, 16]})
    scheme = replace(scheme, pack=lambda w: fp8(w, (48, 16), name="weight_scale_inv"))
    quantised, exact = quantised_model(tmp_path, scheme, "qwen3moe", plain=ROUTERS)
    for found, expected in zip(numbers(weights_of(quantised)), numbers(weights_of(exact)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-7)


@pytest.mark.parametrize("name", ["nf4", "mlx"])
def test_other_quantised_mixtures_are_refused_by_name(name: str, tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, SCHEMES["awq"], "qwen3moe", plain=ROUTERS)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps({**config, SCHEMES[name].key: SCHEMES[name].config}))
    method = {"nf4": "bitsandbytes", "mlx": "MLX"}[name]
    with pytest.raises(ModelError, match=f"mixtures of experts quantised by {method} are not supported; supported are"):
        load_config(quantised)
