"""Softmax over rows on the CPU."""

from __future__ import annotations

import numpy as np

from tessera.engine.ops.cpu.precision import finish, scratch, widen
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class SoftmaxOps(Ops):
    @np.errstate(all="ignore")
    def _softmax(self, x: Tensor, log: bool, out: Tensor) -> None:
        rows = widen(x)
        result = scratch(out)
        np.subtract(rows, rows.max(axis=-1, keepdims=True), out=result)
        if log:
            result -= np.log(np.exp(result).sum(axis=-1, keepdims=True))
        else:
            np.exp(result, out=result)
            result /= result.sum(axis=-1, keepdims=True)
        finish(out, result)
