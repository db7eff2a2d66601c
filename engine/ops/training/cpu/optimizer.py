"""Steps of optimisers on the CPU."""

from __future__ import annotations

import math

import numpy as np

from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.tensor import Tensor

ELEMENTS = 1 << 15  # at a time, so that they stay in the cache


class CpuOptimizerOps(TrainingOps):
    @np.errstate(all="ignore")
    def _adamw(self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
        flat = [tensor.numpy().reshape(-1) for tensor in (weight, gradient, first, second)]
        rate = np.float32(step.learning_rate / (1 - step.beta1**step.step))
        correction = np.float32(1 / math.sqrt(1 - step.beta2**step.step))
        kept = np.float32(1 - step.learning_rate * step.weight_decay)
        for start in range(0, weight.size, ELEMENTS):
            w, g, m, v = (array[start : start + ELEMENTS] for array in flat)
            scaled = g * np.float32(step.gradient_factor)
            m *= np.float32(step.beta1)
            m += scaled * np.float32(1 - step.beta1)
            v *= np.float32(step.beta2)
            np.square(scaled, out=scaled)
            scaled *= np.float32(1 - step.beta2)
            v += scaled
            np.sqrt(v, out=scaled)
            scaled *= correction
            scaled += np.float32(step.eps)
            np.divide(m, scaled, out=scaled)
            scaled *= rate
            w *= kept
            w -= scaled

    @np.errstate(all="ignore")
    def _square_sum(self, x: Tensor, out: Tensor) -> None:
        values = x.numpy().reshape(-1)
        out.numpy()[0] += np.dot(values, values)
