"""Matrix products on the CPU, through the BLAS that NumPy brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tessera.engine.formats import AdapterRows, LinearWeight, LoraStack, WeightPart
from tessera.engine.ops.cpu.precision import Float32Array, finish, rounded, scratch, widen, widen_array
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float32

# Up to this many rows, reading a weight matrix once a row is faster than packing it for a matrix
# product; and each row's result is then the same in any such batch.
MAX_ROWS_AS_VECTORS = 8

# Weights that are not stored in float32 are widened in pieces of about this many elements, which stay in the cache.
WIDENED_ELEMENTS = 1 << 18


class LinearOps(Ops):
    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
        self._product(x, LinearWeight.of(weight, bias), out, accumulate)

    def _product(self, x: Tensor, weight: LinearWeight, out: Tensor, accumulate: bool) -> None:
        rows = widen(x) if weight.order is None else widen(x)[:, weight.order.numpy()]
        residual = widen(out).copy() if accumulate else None
        product = scratch(out)
        if weight.dense is not None and weight.dense.dtype == float32:
            multiply_rows(rows, weight.dense.numpy(), product)
        else:
            start = 0
            for part in weight.parts:
                taken = part.format.input_of(rows)
                for values in _pieces(part):
                    stop = start + len(values)
                    multiply_rows(taken, values, product[:, start:stop])
                    start = stop
        if weight.bias is not None:
            product += widen(weight.bias)
        if residual is not None:
            product += residual
        finish(out, product)

    def _dequantized(self, weight: LinearWeight, dtype: np.dtype[Any]) -> Tensor:
        out = empty(weight.shape, dtype, self.device)
        values, start = out.numpy(), 0
        for piece in (piece for part in weight.parts for piece in _pieces(part)):
            values[start : start + len(piece)] = rounded(piece, dtype)
            start += len(piece)
        return out

    def _add_adapters(self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
        slots, inputs, sums = rows.slots.numpy(), x.numpy(), out.numpy()
        ranks, factors = stack.selection.ranks.numpy(), stack.factors.numpy()
        for slot in np.unique(slots[slots >= 0]).tolist():
            chosen, rank = np.flatnonzero(slots == slot), ranks[slot]
            taken = widen_array(inputs[chosen])
            total = widen_array(sums[chosen])
            start = 0
            for part, count in enumerate(stack.part_rows):
                stop = start + count
                if factors[slot, part]:
                    shrunk = np.empty((len(chosen), rank), float32)
                    multiply_rows(taken, widen_array(stack.a.numpy()[slot, part, :rank]), shrunk)
                    shrunk *= factors[slot, part]
                    delta = np.empty((len(chosen), count), float32)
                    multiply_rows(shrunk, widen_array(stack.b.numpy()[slot, start:stop, :rank]), delta)
                    total[:, start:stop] += delta
                start = stop
            sums[chosen] = rounded(total, out.dtype)


def _pieces(part: WeightPart) -> Iterator[Float32Array]:
    """The rows in float32, a few at a time."""
    step = max(WIDENED_ELEMENTS // part.shape[1], 1)
    arrays = {name: tensor.numpy() for name, tensor in part.tensors.items()}
    for start in range(0, part.shape[0], step):
        yield part.format.dequantize(arrays, slice(start, start + step))


@np.errstate(all="ignore")
def multiply_rows(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    """x [M, K] times weight [N, K] transposed into out [M, N]."""
    if len(x) <= MAX_ROWS_AS_VECTORS:
        x, out = x[:, None], out[:, None]
    np.matmul(x, weight.T, out=out)
