"""Losses and gradients of trainable decoders by the names of a checkpoint, and those that PyTorch found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, micro_batches
from tests.support.references.golden_gradients import places

Array = np.ndarray[Any, Any]


def loss_and_gradients(decoder: TrainableDecoder, examples: Sequence[Example]) -> tuple[float, dict[str, Array]]:
    """The mean loss, and gradients by the names of a checkpoint."""
    total = sum(each.total_weight for each in examples)
    (batch,) = micro_batches(examples, 10_000, total, decoder.functions.device)
    loss = decoder.loss(*batch)
    decoder.functions.backward(loss)
    gradients: dict[str, Array] = {}
    for parameter in decoder.parameters:
        assert parameter.variable.gradient is not None, parameter.name
        array, start = parameter.variable.gradient.numpy(), 0
        for name, rows in parameter.parts:
            part = array[start : start + rows]
            gradients[name] = part.T if parameter.transposed else part
            start += rows
        parameter.variable.gradient = None
    return float(loss.value.numpy()[0]), gradients


def assert_golden(name: str, found: tuple[float, dict[str, Array]], golden: dict[str, Array]) -> None:
    """The loss and every gradient are those of golden_gradients.npz."""
    loss, gradients = found
    assert loss == pytest.approx(float(golden[f"{name}/loss"]), rel=1e-5)
    names = golden[f"{name}/names"].tolist()
    assert set(gradients) == set(names)
    for tensor, norm, some in zip(names, golden[f"{name}/norms"], golden[f"{name}/some"], strict=True):
        gradient = np.ascontiguousarray(gradients[tensor]).reshape(-1)
        assert float(np.linalg.norm(gradient)) == pytest.approx(float(norm), rel=1e-4, abs=1e-7), tensor
        kept = gradient[places(gradient.size)]
        np.testing.assert_allclose(kept, some, rtol=0, atol=1e-4 * float(norm) + 1e-7, err_msg=tensor)
