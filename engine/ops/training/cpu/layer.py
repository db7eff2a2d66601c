"""Backward of norms, activations and softmax on the CPU."""

from __future__ import annotations

import math

import numpy as np

from tessera.engine.ops.cpu.activation import GELU_ELEMENTS, erfc, gelu_erf, gelu_tanh
from tessera.engine.ops.cpu.precision import Float32Array, finish, scratch, store, widen
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor


class CpuLayerTraining(TrainingOps):
    @np.errstate(all="ignore")
    def _rmsnorm_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None, out: Tensor
    ) -> None:
        rows = widen(x)
        inverse = 1 / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + np.float32(eps))
        _normalised_gradient(dy, rows * inverse, inverse, weight, weight_gradient, out, centred=False)

    @np.errstate(all="ignore")
    def _layernorm_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None, out: Tensor
    ) -> None:
        rows = widen(x)
        normalised = rows - rows.mean(axis=-1, keepdims=True)
        inverse = 1 / np.sqrt(np.square(normalised).mean(axis=-1, keepdims=True) + np.float32(eps))
        normalised *= inverse
        _normalised_gradient(dy, normalised, inverse, weight, weight_gradient, out, centred=True)

    @np.errstate(all="ignore")
    def _silu(self, x: Tensor, out: Tensor) -> None:
        values = widen(x)
        store(out, values * _sigmoid(values))

    @np.errstate(all="ignore")
    def _silu_gradient(self, dy: Tensor, x: Tensor, out: Tensor) -> None:
        values = widen(x)
        store(out, widen(dy) * _silu_slope(values, _sigmoid(values)))

    @np.errstate(all="ignore")
    def _gelu_gradient(self, dy: Tensor, x: Tensor, tanh: bool, out: Tensor) -> None:
        store(out, widen(dy) * _gelu_slope(widen(x), tanh))

    @np.errstate(all="ignore")
    def _silu_mul_gradient(self, dy: Tensor, gate_up: Tensor, out: Tensor) -> None:
        both, upper, result = widen(gate_up), widen(dy), scratch(out)
        width = both.shape[1] // 2
        gate, up = both[:, :width], both[:, width:]
        sigmoid = _sigmoid(gate)
        slope = _silu_slope(gate, sigmoid)
        slope *= up
        np.multiply(slope, upper, out=result[:, :width])
        sigmoid *= gate
        np.multiply(sigmoid, upper, out=result[:, width:])
        finish(out, result)

    @np.errstate(all="ignore")
    def _gelu_mul_gradient(self, dy: Tensor, gate_up: Tensor, tanh: bool, out: Tensor) -> None:
        both, upper, result = widen(gate_up), widen(dy), scratch(out)
        width = both.shape[1] // 2
        gate = np.ascontiguousarray(both[:, :width])
        slope = _gelu_slope(gate, tanh)
        slope *= both[:, width:]
        np.multiply(slope, upper, out=result[:, :width])
        np.multiply(gelu_tanh(gate) if tanh else gelu_erf(gate), upper, out=result[:, width:])
        finish(out, result)

    @np.errstate(all="ignore")
    def _softmax_gradient(self, dy: Tensor, y: Tensor, log: bool, out: Tensor) -> None:
        upper, rows = dy.numpy(), y.numpy()
        if log:
            np.subtract(upper, np.exp(rows) * upper.sum(axis=-1, keepdims=True), out=out.numpy())
        else:
            np.multiply(rows, upper - (upper * rows).sum(axis=-1, keepdims=True), out=out.numpy())


def _normalised_gradient(
    dy: Tensor,
    normalised: Float32Array,
    inverse: Float32Array,
    weight: Tensor,
    weight_gradient: Tensor | None,
    out: Tensor,
    *,
    centred: bool,
) -> None:
    """dx = inverse * (g - normalised * mean(g * normalised)), g = dy * weight; `centred` also takes g's mean off it."""
    upper = widen(dy)
    if weight_gradient is not None:
        weight_gradient.numpy()[...] += np.einsum("th,th->h", upper, normalised)
    scaled = upper * widen(weight)
    along = np.einsum("th,th->t", scaled, normalised)[:, None] / np.float32(scaled.shape[1])
    if centred:
        scaled -= scaled.mean(axis=-1, keepdims=True)
    normalised *= along
    scaled -= normalised
    scaled *= inverse
    store(out, scaled)


def _sigmoid(x: Float32Array) -> Float32Array:
    result = np.exp(-x)
    result += 1
    sigmoid: Float32Array = np.divide(1, result, out=result)
    return sigmoid


def _silu_slope(x: Float32Array, sigmoid: Float32Array) -> Float32Array:
    """sigmoid * (1 + x * (1 - sigmoid))"""
    slope: Float32Array = np.subtract(1, sigmoid)
    slope *= x
    slope += 1
    slope *= sigmoid
    return slope


def _gelu_slope(x: Float32Array, tanh: bool) -> Float32Array:
    """The derivative of `gelu_tanh` or `gelu_erf`."""
    if tanh:
        cubic = np.float32(0.044715)
        inner = np.float32(2 * math.sqrt(2 / math.pi))
        sigmoid = _sigmoid(inner * (x + cubic * x * x * x))
        slope: Float32Array = sigmoid + x * sigmoid * (1 - sigmoid) * inner * (1 + 3 * cubic * x * x)
        return slope
    result = np.empty(x.shape, np.float32)
    flat, flat_result = x.reshape(-1), result.reshape(-1)
    for start in range(0, flat.size, GELU_ELEMENTS):
        part = flat[start : start + GELU_ELEMENTS].astype(np.float64)
        density = np.exp(-0.5 * part * part) / math.sqrt(2 * math.pi)
        flat_result[start : start + GELU_ELEMENTS] = 0.5 * erfc(part * -math.sqrt(0.5)) + part * density
    return result
