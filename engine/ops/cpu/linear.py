"""Matrix products on the CPU, through the BLAS that NumPy brings."""

from __future__ import annotations

import numpy as np

from tessera.engine.ops.cpu.precision import Float32Array, finish, scratch, widen, widen_array
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, float32

# Up to this many rows, reading a weight matrix once a row is faster than packing it for a matrix
# product; and each row's result is then the same in any such batch.
MAX_ROWS_AS_VECTORS = 8

# Half-precision weights are widened in pieces of about this many elements, which stay in the cache.
WIDENED_ELEMENTS = 1 << 18


class LinearOps(Ops):
    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
        rows = widen(x)
        weights = weight.numpy()
        residual = widen(out).copy() if accumulate else None
        product = scratch(out)
        if weight.dtype == float32:
            _product(rows, weights, product)
        else:
            step = max(WIDENED_ELEMENTS // weights.shape[1], 1)
            for start in range(0, len(weights), step):
                piece = slice(start, start + step)
                _product(rows, widen_array(weights[piece]), product[:, piece])
        if bias is not None:
            product += widen(bias)
        if residual is not None:
            product += residual
        finish(out, product)


@np.errstate(all="ignore")
def _product(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    """x [M, K] times weight [N, K] transposed into out [M, N]."""
    if len(x) <= MAX_ROWS_AS_VECTORS:
        x, out = x[:, None], out[:, None]
    np.matmul(x, weight.T, out=out)
