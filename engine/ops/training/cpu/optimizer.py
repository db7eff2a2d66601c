"""Steps of optimisers on the CPU."""

from __future__ import annotations

import math

import numpy as np

from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.ops.training.moment_codes import BLOCK, CodedMoment, Floats, code_bounds, code_values
from tessera.engine.tensor import Tensor

ELEMENTS = 1 << 15  # at a time, so that they stay in the cache; whole blocks of codes


class CpuOptimizerOps(TrainingOps):
    @np.errstate(all="ignore")
    def _adamw(self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
        flat = [tensor.numpy().reshape(-1) for tensor in (weight, gradient, first, second)]
        for start in range(0, weight.size, ELEMENTS):
            w, g, m, v = (array[start : start + ELEMENTS] for array in flat)
            _take_step(w, g, m, v, step)

    @np.errstate(all="ignore")
    def _adamw_8bit(
        self, weight: Tensor, gradient: Tensor, first: CodedMoment, second: CodedMoment, step: AdamWStep
    ) -> None:
        w, g = (tensor.numpy().reshape(-1) for tensor in (weight, gradient))
        for start in range(0, weight.size, ELEMENTS):
            stop = min(start + ELEMENTS, weight.size)
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            m, v = _decoded(first, blocks, signed=True), _decoded(second, blocks, signed=False)
            count = stop - start
            _take_step(w[start:stop], g[start:stop], m.reshape(-1)[:count], v.reshape(-1)[:count], step)
            _encode(m, first, blocks, signed=True)
            _encode(v, second, blocks, signed=False)

    @np.errstate(all="ignore")
    def _square_sum(self, x: Tensor, out: Tensor) -> None:
        values = x.numpy().reshape(-1)
        out.numpy()[0] += np.dot(values, values)


def _take_step(w: Floats, g: Floats, m: Floats, v: Floats, step: AdamWStep) -> None:
    """In place in w, m and v."""
    rate = np.float32(step.learning_rate / (1 - step.beta1**step.step))
    correction = np.float32(1 / math.sqrt(1 - step.beta2**step.step))
    kept = np.float32(1 - step.learning_rate * step.weight_decay)
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


def _decoded(moment: CodedMoment, blocks: slice, *, signed: bool) -> Floats:
    """[blocks, BLOCK]"""
    values = code_values(signed=signed)[moment.codes.numpy()[blocks].view(np.uint8)]
    values *= moment.scales.numpy()[blocks, None]
    return values


def _encode(values: Floats, moment: CodedMoment, blocks: slice, *, signed: bool) -> None:
    scales = np.abs(values).max(axis=1)
    shares = np.divide(values, scales[:, None], out=np.zeros_like(values), where=scales[:, None] > 0)
    codes = np.searchsorted(code_bounds(signed=signed), shares.reshape(-1)).reshape(values.shape)
    if not signed:
        np.maximum(codes, values > 0, out=codes)
    moment.codes.numpy()[blocks] = codes.astype(np.uint8).view(np.uint32)
    moment.scales.numpy()[blocks] = scales
