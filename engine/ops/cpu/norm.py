"""Normalisation of rows on the CPU."""

from __future__ import annotations

import numpy as np

from tessera.engine.ops.cpu.precision import Float32Array, rounded, store, widen, widen_array
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class NormOps(Ops):
    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        store(out, rms_normalised(widen(x), widen(weight), eps))

    @np.errstate(all="ignore")
    def _rmsnorm_add(self, x: Tensor, weight: Tensor, eps: float, stream: Tensor, out: Tensor) -> None:
        normed = rounded(rms_normalised(widen(x), widen(weight), eps), out.dtype)
        store(out, widen(stream) + widen_array(normed))

    @np.errstate(all="ignore")
    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        rows = widen(x)
        centred = rows - rows.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        centred /= np.sqrt(variance + np.float32(eps))
        centred *= widen(weight)
        if bias is not None:
            centred += widen(bias)
        store(out, centred)

    @np.errstate(all="ignore")
    def _norm_columns(self, x: Tensor, weight: Tensor, eps: float, first: int, groups: int, centred: bool) -> None:
        columns = x.numpy()[:, first : first + weight.shape[0]]
        vectors = widen_array(columns).reshape(len(columns), groups, -1)
        if centred:
            vectors = vectors - vectors.mean(axis=-1, keepdims=True)
        normalised = rms_normalised(vectors, widen(weight).reshape(groups, -1), eps)
        columns[...] = normalised.reshape(columns.shape)


@np.errstate(all="ignore")
def rms_normalised(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    normalised: Float32Array = x / np.sqrt(mean_square + np.float32(eps))
    normalised *= weight
    return normalised
