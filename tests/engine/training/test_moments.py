"""AdamW's moments in eight bits: their codes, steps against float64, and whole trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.ops.training.interface import AdamWStep
from tessera.engine.ops.training.moment_codes import (
    BLOCK,
    NUM_CODES,
    CodedMoment,
    code_values,
    zero_code,
)
from tessera.engine.tensor import CPU, from_numpy
from tessera.engine.training.checkpoint import Checkpoints, load_checkpoint
from tessera.engine.training.plan import PlannedTraining, TrainingPlan, plan_supervised
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.processes.training_child import SETTINGS, examples

Array = np.ndarray[Any, Any]
SIGNS = {"signed": True, "unsigned": False}


def decoded(moment: CodedMoment, *, signed: bool) -> Array:
    """[blocks, BLOCK] in float64."""
    values = code_values(signed=signed).astype(np.float64)[moment.codes.numpy().view(np.uint8)]
    return values * moment.scales.numpy()[:, None]


@pytest.mark.parametrize("signed", SIGNS.values(), ids=SIGNS)
def test_the_codes_are_those_of_the_paper(signed: bool) -> None:
    values = code_values(signed=signed)
    assert values.shape == (NUM_CODES,)
    assert (np.diff(values) > 0).all()
    assert values[-1] == 1
    assert np.count_nonzero(values == 0) == 1
    # 64 places between a tenth and one where a bit is the sign, else 128; half as many in each decade below.
    for decade in range(7):
        inside = (values > 10.0 ** -(decade + 1)) & (values < 10.0**-decade)
        assert np.count_nonzero(inside) == 2 ** (7 - decade - signed)
    if signed:
        np.testing.assert_array_equal(values[:127], -values[128:255][::-1])
        assert values[zero_code()] == 0


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
def test_a_step_is_that_of_adamw_from_what_the_codes_stand_for(size: int) -> None:
    rng = np.random.default_rng(size)
    ops = Functions.on(CPU).training
    weight = from_numpy(rng.normal(size=size).astype(np.float32), CPU)
    first, second = (CodedMoment.zeros(size, CPU, signed=signed) for signed in (True, False))
    for number in range(1, 6):
        gradient = rng.normal(size=size) * 10.0 ** rng.uniform(-4, 0, size)
        gradient[rng.random(size) < 0.2] = 0
        gradient = gradient.astype(np.float32)
        w, (m, v) = (
            weight.numpy().astype(np.float64),
            (decoded(moment, signed=signed).reshape(-1)[:size] for moment, signed in ((first, True), (second, False))),
        )
        ops.adamw_8bit(
            weight, from_numpy(gradient, CPU), first, second, AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, number, 0.5)
        )
        scaled = gradient.astype(np.float64) * 0.5
        m, v = 0.9 * m + 0.1 * scaled, 0.95 * v + 0.05 * scaled**2
        step = m / (1 - 0.9**number) / (np.sqrt(v / (1 - 0.95**number)) + 1e-8)
        np.testing.assert_allclose(weight.numpy(), w * (1 - 1e-3) - 1e-2 * step, rtol=1e-5, atol=1e-6)
        for exact, moment, signed in ((m, first, True), (v, second, False)):
            found = decoded(moment, signed=signed)
            blocks = np.zeros_like(found)
            blocks.reshape(-1)[:size] = exact
            scales = np.abs(blocks).max(axis=1)
            np.testing.assert_allclose(moment.scales.numpy(), scales, rtol=1e-5)
            assert (found.reshape(-1)[size:] == 0).all()
            shares = blocks / np.where(scales > 0, scales, 1)[:, None]
            values = code_values(signed=signed).astype(np.float64)
            nearest = np.abs(shares[..., None] - values).min(axis=-1)
            off = np.abs(found / np.where(scales > 0, scales, 1)[:, None] - shares)
            lifted = (not signed) & (shares > 0) & (shares < values[1])
            assert (off <= nearest + 1e-6)[~lifted].all()
            if not signed:
                assert (found[blocks > 0] > 0).all()


def test_what_has_never_had_a_gradient_stays_zero() -> None:
    ops = Functions.on(CPU).training
    weight, gradient = (from_numpy(np.zeros(300, np.float32), CPU) for _ in range(2))
    moments = [CodedMoment.zeros(300, CPU, signed=signed) for signed in (True, False)]
    ops.adamw_8bit(weight, gradient, moments[0], moments[1], AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.0, 1))
    assert (weight.numpy() == 0).all()
    for moment, signed in zip(moments, (True, False), strict=True):
        assert (decoded(moment, signed=signed) == 0).all()
        assert (moment.codes.numpy() == CodedMoment.zeros(300, CPU, signed=signed).codes.numpy()).all()


def test_wrong_shapes_are_refused() -> None:
    ops = Functions.on(CPU).training
    x = from_numpy(np.zeros(300, np.float32), CPU)
    right, wrong = (CodedMoment.zeros(size, CPU, signed=True) for size in (300, 600))
    step = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.0, 1)
    for first, second in ((wrong, right), (right, wrong)):
        with pytest.raises(TesseraError, match="adamw_8bit"):
            ops.adamw_8bit(x, x, first, second, step)


# -- trainings --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama-tied-biases"], tmp_path_factory.mktemp("model"))


def planned(model: Path, folder: Path, num_steps: int, *, eight_bit: bool) -> PlannedTraining[Any]:
    run = replace(SETTINGS, num_steps=num_steps)
    plan = TrainingPlan(model, "tiny", None, run, max_length=64, eight_bit=eight_bit, micro_batch_tokens=64)
    return plan_supervised(plan, folder, examples(), [])


def state_in(folder: Path) -> dict[str, Array]:
    """Of the newest checkpoint."""
    newest = Checkpoints(folder / "checkpoints").newest()
    assert newest is not None
    tensors, _ = load_checkpoint(newest, CPU)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_a_training_goes_as_with_moments_in_float32(model: Path, tmp_path: Path) -> None:
    both = [planned(model, tmp_path / str(eight), 60, eight_bit=eight) for eight in (False, True)]
    for training in both:
        training.run.run()
    exact, coded = (np.array([record.loss for record in training.run.records]) for training in both)
    assert exact[-1] < 0.7 * exact[0]
    np.testing.assert_allclose(coded, exact, rtol=0.05)
    assert not np.array_equal(coded, exact)
    exact_state, coded_state = (state_in(tmp_path / str(eight)) for eight in (False, True))
    matrices = [name for name in coded_state if name.startswith("first_codes/")]
    assert matrices
    for name in matrices:
        moment = [coded_state[f"{part}/{name[12:]}"] for part in ("first_codes", "first_scales")]
        assert sum(each.nbytes for each in moment) < 0.3 * exact_state[f"first/{name[12:]}"].nbytes
    assert "first/embedding.weight" in coded_state


def test_a_resumed_training_has_the_same_bits_and_no_other_optimiser(model: Path, tmp_path: Path) -> None:
    whole = planned(model, tmp_path / "whole", 9, eight_bit=True)
    whole.run.run()
    stopped = planned(model, tmp_path / "stopped", 9, eight_bit=True)
    stopped.run.run(is_stopped=lambda: stopped.run.step == 4)
    resumed = planned(model, tmp_path / "stopped", 9, eight_bit=True)
    assert resumed.run.resume() == 4
    resumed.run.run()
    expected, found = state_in(tmp_path / "whole"), state_in(tmp_path / "stopped")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    other = planned(model, tmp_path / "stopped", 9, eight_bit=False)
    with pytest.raises(ConfigError, match='its optimizer is "adamw_8bit", and here it is not set'):
        other.run.resume()
