"""The loss and the gradients of adapters on all projections of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.tensor import float32, from_numpy
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, micro_batches
from tessera.engine.training.lora import LoraSettings, adapter_parameters, make_adapters
from tessera.engine.training.parameters import load_parameters
from tests.support.models.tiny_models import prompt

Array = np.ndarray[Any, Any]
Found = tuple[float, dict[str, Array]]


def adapter_gradients(f: Functions, folder: Path, dtype: Any = float32) -> Found:
    """B is random, too, so that A has a gradient."""
    parameters = load_parameters(folder, f.ops, dtype)
    parameters.freeze()
    adapters = make_adapters(parameters, LoraSettings(rank=4), f.device, dtype, seed=3)
    for name in sorted(adapters):
        b = adapters[name].b
        random = np.random.default_rng(len(name)).normal(size=b.shape) * 0.05
        b.value = from_numpy(random.astype(dtype), f.device)
    decoder = TrainableDecoder(parameters, f, max_len=64, adapters=adapters)
    ids = np.array(prompt(), np.int32)
    example = Example(ids, np.ones(len(ids), np.float32))
    (batch,) = micro_batches([example], 1000, example.total_weight, f.device)
    loss = decoder.loss(*batch)
    f.backward(loss)
    gradients = {}
    for parameter in adapter_parameters(adapters):
        assert parameter.variable.gradient is not None, parameter.name
        gradients[parameter.name] = parameter.variable.gradient.numpy()
    return float(loss.value.numpy()[0]), gradients


def assert_alike(found: Found, expected: Found, tolerance: float) -> None:
    """Relative to each gradient's norm."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        wanted = expected[1][name]
        assert np.linalg.norm(gradient - wanted) <= tolerance * np.linalg.norm(wanted), name
