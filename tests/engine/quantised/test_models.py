"""Tiny models in every scheme against the numbers that their tensors stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.engine.models.config import load_config
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.op_cases import Array
from tests.support.quantisers import SCHEMES, quantised_model
from tests.support.tiny_models import prompt


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
