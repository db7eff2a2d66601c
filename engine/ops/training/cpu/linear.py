"""Backward of matrix products on the CPU, through the BLAS that NumPy brings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.engine.ops.cpu.precision import finish, scratch, store, widen, widen_array
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, float32


class CpuLinearTraining(TrainingOps):
    @np.errstate(all="ignore")
    def _matmul_input_gradient(self, dy: Tensor, weight: Tensor, out: Tensor) -> None:
        result = scratch(out)
        np.matmul(widen(dy), widen(weight), out=result)
        finish(out, result)

    @np.errstate(all="ignore")
    def _matmul_weight_gradient(self, dy: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
        result = out.numpy()
        if accumulate:
            result += np.matmul(widen(dy).T, widen(x))
        else:
            np.matmul(widen(dy).T, widen(x), out=result)

    @np.errstate(all="ignore")
    def _sum_rows(self, x: Tensor, out: Tensor, accumulate: bool) -> None:
        result = out.numpy()
        sums = widen(x).sum(axis=0)
        if accumulate:
            result += sums
        else:
            result[...] = sums

    @np.errstate(all="ignore")
    def _embedding_gradient(self, dy: Tensor, ids: Tensor, out: Tensor) -> None:
        rows = ids.numpy()
        order = np.argsort(rows, kind="stable")
        order = order[(rows[order] >= 0) & (rows[order] < out.shape[0])]
        if not order.size:
            return
        named, starts = np.unique(rows[order], return_index=True)
        out.numpy()[named] += np.add.reduceat(widen(dy)[order], starts, axis=0)

    @np.errstate(all="ignore")
    def _columns(self, x: Tensor, start: int, factor: float, out: Tensor) -> None:
        taken = x.numpy()[:, start : start + out.shape[1]]
        if factor == 1.0:
            out.numpy()[...] = taken
        else:
            store(out, widen_array(taken) * np.float32(factor))

    def _join_columns(self, parts: Sequence[Tensor], out: Tensor) -> None:
        np.concatenate([part.numpy() for part in parts], axis=1, out=out.numpy())

    @np.errstate(all="ignore")
    def _add_columns(self, x: Tensor, part: Tensor, start: int, factor: float, out: Tensor) -> None:
        if out.pointer != x.pointer:
            out.numpy()[...] = x.numpy()
        place = out.numpy()[:, start : start + part.shape[1]]
        added = widen(part) if factor == 1.0 else widen(part) * np.float32(factor)
        if out.dtype == float32:
            place += added
        else:
            place[...] = place.astype(np.float32) + added
