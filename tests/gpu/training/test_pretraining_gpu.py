"""Trainings from random weights on the GPU; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.builtin.training.render import FOLDER
from tessera.engine.builtin.training.rows import RowMaker
from tessera.engine.builtin.training.train import TOKENIZER, seconds_per_step
from tessera.engine.models.config import load_config
from tessera.engine.tensor import CPU, bfloat16, float32
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import pack
from tessera.engine.training.parameters import initial_parameters
from tests.support.cases.op_cases import Array
from tests.support.models.tiny_pretraining import make_base, settings_in, trained

pytestmark = pytest.mark.gpu


def test_logits_are_those_of_the_cpu_small(training: Functions, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    examples = RowMaker(FOLDER / TOKENIZER, 2, 24, seed=1)(0)
    found: list[Array] = []
    for f in (training, Functions.on(CPU)):
        dtype = float32 if f.device is CPU else bfloat16
        decoder = TrainableDecoder(initial_parameters(load_config(base), f.ops, dtype, seed=1), f, max_len=24)
        batch = pack(examples, 1.0, f.device)
        places = f.variable(np.array([3, 30, 47], np.int32)).value
        logits = decoder.logits(batch.token_ids, batch.sequences, places)
        assert logits.dtype == float32
        found.append(logits.numpy())
    assert np.linalg.norm(found[0] - found[1]) < 0.03 * np.linalg.norm(found[1])


def test_a_model_learns_from_random_weights(training: Functions, tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "out", make_base(tmp_path / "base"), num_steps=300, num_rows=8, length=256)
    _, losses = trained(settings, training)
    assert losses[0] > 7
    assert np.mean(losses[-20:]) < 2.5


def test_a_stopped_training_goes_on_with_the_same_bits_small(training: Functions, tmp_path: Path) -> None:
    """Whichever of its steps are graphs; and losses are near those of the CPU in float32."""
    settings = partial(settings_in, base=make_base(tmp_path / "base"), num_steps=6, save_every=2)
    trained(settings(tmp_path / "stopped"), training, stop=3)
    stopped = trained(settings(tmp_path / "stopped"), training)
    assert stopped == trained(settings(tmp_path / "whole"), training)
    _, losses = trained(settings(tmp_path / "cpu"), Functions.on(CPU))
    np.testing.assert_allclose(stopped[1], losses, rtol=0.02)


def test_steps_are_timed(training: Functions, tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "out", make_base(tmp_path / "base"), num_workers=1)
    assert 0 < seconds_per_step(settings, training) < 1
