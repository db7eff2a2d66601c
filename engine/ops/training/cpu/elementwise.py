"""Elementwise training operations on the CPU."""

from __future__ import annotations

import numpy as np

from tessera.engine.ops.cpu.precision import store, widen
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, float32


class CpuElementwiseTraining(TrainingOps):
    @np.errstate(all="ignore")
    def _sub(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        store(out, widen(a) - widen(b))

    @np.errstate(all="ignore")
    def _div(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        store(out, widen(a) / widen(b))

    @np.errstate(all="ignore")
    def _add_row(self, x: Tensor, row: Tensor, out: Tensor) -> None:
        store(out, widen(x) + widen(row))

    @np.errstate(all="ignore")
    def _sum(self, x: Tensor, out: Tensor) -> None:
        out.numpy()[0] = widen(x).sum()

    def _broadcast(self, x: Tensor, out: Tensor) -> None:
        out.numpy()[...] = x.numpy()[0]

    @np.errstate(all="ignore")
    def _add_to(self, out: Tensor, x: Tensor, factor: float) -> None:
        added = widen(x) if factor == 1.0 else widen(x) * np.float32(factor)
        if out.dtype == float32:
            result = out.numpy()
            result += added
        else:
            store(out, widen(out) + added)
