"""Adapters trained over quantised models (QLoRA), against the same over the numbers that their tensors stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.errors import ConfigError
from tessera.engine.tensor import CPU
from tessera.engine.training.lora import LoraSettings, make_adapters, merge
from tessera.engine.training.parameters import load_parameters
from tessera.engine.training.plan import TrainingPlan, plan_supervised
from tessera.engine.training.run import RunSettings
from tests.support.cases.quantisers import SCHEMES, quantised_model
from tests.support.references.adapter_gradients import adapter_gradients, assert_alike

ORDERED = ("w4a16-actorder", "gptq-actorder")


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ORDERED])
def test_adapters_have_the_gradients_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    quantised, exact = quantised_model(tmp_path, SCHEMES[name])
    f = Functions.on(CPU)
    found, expected = (adapter_gradients(f, folder) for folder in (quantised, exact))
    assert_alike(found, expected, 0.3 if SCHEMES[name].rounds_input else 1e-4)


@pytest.mark.parametrize("name", ORDERED)
def test_an_order_of_columns_is_refused(name: str, tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, SCHEMES[name])
    with pytest.raises(ConfigError, match=r"layers\.0\..*_proj.weight has columns in another order \(act-order\)"):
        load_parameters(quantised, Functions.on(CPU).ops)


def test_only_adapters_are_trained_and_none_is_merged(tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, SCHEMES["awq"])
    run = RunSettings(num_steps=1, batch_size=1, learning_rate=1e-3)
    plan = TrainingPlan(model=quantised, name="tiny", lora=None, run=run, max_length=64)
    with pytest.raises(ConfigError, match="tiny is quantised, and of such a model only adapters can be trained"):
        plan_supervised(plan, tmp_path / "out", [], [])
    f = Functions.on(CPU)
    parameters = load_parameters(quantised, f.ops)
    adapters = make_adapters(parameters, LoraSettings(rank=2), CPU, seed=1)
    with pytest.raises(ConfigError, match="_proj is quantised, so that no adapter can be merged into it"):
        merge(parameters, adapters, f.ops)


def test_weights_are_dequantised_row_by_row(tmp_path: Path) -> None:
    quantised, exact = quantised_model(tmp_path, SCHEMES["awq"])
    f = Functions.on(CPU)
    found, expected = (load_parameters(folder, f.ops) for folder in (quantised, exact))
    for (layer, field), matrix in found.quantised.items():
        dense = expected.variable(layer, field).value
        np.testing.assert_allclose(f.ops.dequantize(matrix.weight, dense.dtype).numpy(), dense.numpy(), rtol=2e-7)
