"""Elementwise operations and rows of a table on the CPU."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tessera.engine.formats import PackedBlockFormat, WeightPart
from tessera.engine.ops.cpu.precision import store, widen
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import FLOAT_DTYPES, Tensor

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


class ElementwiseOps(Ops):
    @np.errstate(all="ignore")
    def _add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        store(out, widen(a) + widen(b))

    @np.errstate(all="ignore")
    def _mul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        store(out, widen(a) * widen(b))

    @np.errstate(all="ignore")
    def _scale(self, x: Tensor, factor: float, out: Tensor) -> None:
        store(out, widen(x) * np.float32(factor))

    @np.errstate(all="ignore")
    def _soft_cap(self, x: Tensor, cap: float, out: Tensor) -> None:
        store(out, np.tanh(widen(x) / np.float32(cap)) * np.float32(cap))

    def _copy(self, x: Tensor, out: Tensor) -> None:
        if x.dtype == out.dtype or out.dtype not in FLOAT_DTYPES:
            out.numpy()[...] = x.numpy()
        else:
            store(out, widen(x))

    def _embedding(self, ids: Tensor, table: Tensor, sampled: Tensor | None, factor: float, out: Tensor) -> None:
        rows = _resolved(ids, sampled)
        chosen = out.numpy()
        np.take(table.numpy(), rows, axis=0, out=chosen, mode="clip")
        chosen[(rows < 0) | (rows >= table.shape[0])] = 0
        if factor != 1.0:
            self._scale(out, factor, out)

    def _lookup(self, ids: Tensor, part: WeightPart, sampled: Tensor | None, out: Tensor) -> None:
        rows, last = _resolved(ids, sampled), part.shape[0] - 1
        arrays = {name: tensor.numpy() for name, tensor in part.tensors.items()}
        chosen = part.format.dequantize(arrays, rows.clip(0, last))
        chosen[(rows < 0) | (rows > last)] = 0
        store(out, chosen)

    def _pack_blocks(self, stored: Tensor, part: WeightPart, first: int) -> None:
        assert isinstance(part.format, PackedBlockFormat)
        for name, array in part.format.pack(stored.numpy()).items():
            part.tensors[name].numpy()[first : first + len(array)] = array

    def _scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None:
        kept = rows.numpy() >= 0
        places = np.zeros(len(kept), np.int32) if columns is None else columns.numpy()
        table.numpy()[rows.numpy()[kept], places[kept]] = values.numpy()[kept]


def _resolved(ids: Tensor, sampled: Tensor | None) -> IntArray:
    """Row numbers, those of negative ids looked up in `sampled`."""
    rows = ids.numpy()
    if sampled is None or not (rows < 0).any():
        return rows
    return np.where(rows < 0, sampled.numpy()[np.maximum(-1 - rows, 0)], rows)
