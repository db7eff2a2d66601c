"""What every operation checks of its tensors before it touches them."""

from __future__ import annotations

from abc import ABC
from typing import Any

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats import LinearWeight
from tessera.engine.tensor import Device, Tensor, empty, float32


class CheckedOps(ABC):
    """Base of the groups of operations; all tensors of a call live on `device`."""

    device: Device

    def _check(self, **tensors: Tensor | LinearWeight | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.device is not self.device:
                raise TesseraError(f"{name} is on {tensor.device}, but this operation runs on {self.device}")

    def _out(
        self,
        out: Tensor | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        also: np.dtype[Any] | None = None,
    ) -> Tensor:
        if out is None:
            return empty(shape, dtype, self.device)
        if out.shape != shape or out.dtype not in (dtype, also or dtype):
            raise TesseraError(f"out is {out.shape} {out.dtype}, but the result is {shape} {dtype}")
        return out


def require(condition: bool, what: str, *tensors: Tensor | LinearWeight) -> None:
    """Raise TesseraError naming the tensors unless `condition` holds."""
    if not condition:
        raise TesseraError(f"{what}: shapes or dtypes do not fit: {', '.join(map(repr, tensors))}")


def require_cos_sin(cos_sin: Tensor, head_dim: int) -> None:
    """The same for the cosines and sines of a RoPE over heads of this size; see `HeadTransform`."""
    fits = cos_sin.ndim == 2 and cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= head_dim
    require(fits and cos_sin.dtype == float32, f"cos_sin of heads of {head_dim}", cos_sin)
