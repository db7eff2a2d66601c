"""Direct preference optimisation: loss and gradients against a forward in float64, and what a model learns by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.tensor import CPU
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import Parameters, load_parameters
from tessera.engine.training.preferences import Preference, PreferenceTrainer, with_references
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.references.llama_reference import log_softmax, logits_after

Array = np.ndarray[Any, Any]
BETA = 0.3
NUM_PROMPT = 4
STEP = 1e-4
MODEL = TINY_MODELS["llama"]


def preferences(count: int = 3) -> list[Preference]:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        prompt = rng.integers(3, 90, NUM_PROMPT)
        pair = []
        for length in rng.integers(1, 5, 2):
            ids = np.append(prompt, rng.integers(3, 90, length)).astype(np.int32)
            pair.append(Example(ids, (np.arange(len(ids)) >= NUM_PROMPT).astype(np.float32)))
        found.append(Preference(pair[0], pair[1]))
    return found


@pytest.fixture
def parameters(tmp_path: Path) -> Parameters:
    return load_parameters(build(MODEL, tmp_path), Functions.on(CPU).ops)


def trainer_of(parameters: Parameters, micro_batch_tokens: int = 20) -> PreferenceTrainer:
    f = Functions.on(CPU)
    decoder = TrainableDecoder(parameters, f, max_len=32)
    optimizer = AdamW(list(parameters), f.ops, f.training, AdamWSettings())
    return PreferenceTrainer(
        decoder, optimizer, micro_batch_tokens=micro_batch_tokens, max_gradient_norm=1.0, beta=BETA
    )


def log_probability(tensors: dict[str, Array], example: Example) -> float:
    ids = example.token_ids.tolist()
    logs = (
        log_softmax(logits_after(MODEL.config, tensors, ids[:place]))[ids[place]]
        for place in range(NUM_PROMPT, len(ids))
    )
    return float(sum(logs))


def loss_in_float64(tensors: dict[str, Array], pairs: list[Preference], references: list[float]) -> float:
    """From its definition."""
    total = 0.0
    for pair, reference in zip(pairs, references, strict=True):
        margin = log_probability(tensors, pair.preferred) - log_probability(tensors, pair.rejected) - reference
        total += -math.log(1 / (1 + math.exp(-BETA * margin)))
    return total / len(pairs)


def test_loss_and_gradients_are_those_of_central_differences(parameters: Parameters) -> None:
    pairs = preferences()
    trainer = trainer_of(parameters)
    tensors = {name: tensor.numpy().astype(np.float64) for name, tensor in parameters.stored().items()}
    references = [log_probability(tensors, pair.preferred) - log_probability(tensors, pair.rejected) for pair in pairs]
    referred = with_references(trainer.decoder, pairs, 20)
    np.testing.assert_allclose([pair.reference for pair in referred], references, atol=1e-4)

    rng = np.random.default_rng(8)
    for parameter in parameters:  # so that the model is no longer its reference
        array = parameter.variable.value.numpy()
        array += rng.normal(0, 0.1 * float(array.std()) + 1e-3, array.shape).astype(np.float32)
    moved = {name: tensor.numpy().astype(np.float64) for name, tensor in parameters.stored().items()}
    loss = trainer.accumulate_gradients(referred)
    assert loss == pytest.approx(loss_in_float64(moved, pairs, references), rel=1e-4)
    assert abs(loss - math.log(2)) > 0.01
    assert trainer.evaluate(referred) == pytest.approx(loss, rel=1e-6)

    for parameter in parameters:
        assert parameter.variable.gradient is not None
        gradient, start = parameter.variable.gradient.numpy(), 0
        name, rows = parameter.parts[-1]
        start = sum(count for _, count in parameter.parts[:-1])
        part = np.ascontiguousarray(gradient[start : start + rows]).reshape(-1)
        place = int(np.abs(part).argmax())
        flat = moved[name].reshape(-1)
        before, losses = flat[place], []
        for value in (before + STEP, before - STEP):
            flat[place] = value
            losses.append(loss_in_float64(moved, pairs, references))
        flat[place] = before
        slope = (losses[0] - losses[1]) / (2 * STEP)
        assert float(part[place]) == pytest.approx(slope, rel=2e-3, abs=1e-6), name


def test_micro_batches_do_not_change_the_gradient(parameters: Parameters) -> None:
    gradients = []
    for tokens in (1, 1000):
        trainer = trainer_of(parameters, tokens)
        trainer.accumulate_gradients(with_references(trainer.decoder, preferences(), tokens))
        gradients.append(parameters.variable(0, "down").gradient)
        for parameter in parameters:
            parameter.variable.gradient = None
    assert gradients[0] is not None and gradients[1] is not None  # noqa: PT018  for the type checker
    np.testing.assert_allclose(gradients[0].numpy(), gradients[1].numpy(), atol=1e-6)


def test_the_model_learns_to_prefer(parameters: Parameters) -> None:
    trainer = trainer_of(parameters)
    pairs = with_references(trainer.decoder, preferences(), 20)
    losses = [trainer.step(pairs, 1e-3).loss for _ in range(10)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
