"""Between a tensor's dtype and the float32 that every operation computes in."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tessera.engine.tensor import Tensor, float32

Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


def widen(tensor: Tensor) -> Float32Array:
    """The elements as float32: a float32 tensor's own memory (not to be written), else a copy."""
    return widen_array(tensor.numpy())


def widen_array(array: np.ndarray[Any, Any]) -> Float32Array:
    return array if array.dtype == float32 else array.astype(float32)


@np.errstate(all="ignore")
def rounded(values: Float32Array, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """`values` in `dtype`, each rounded once to nearest; too large ones become infinite."""
    return values if values.dtype == dtype else values.astype(dtype)


@np.errstate(all="ignore")
def store(out: Tensor, values: Float32Array) -> None:
    """Write `values`, of as many elements as `out`, into it; each is rounded once."""
    out.numpy()[...] = values.reshape(out.shape)


def scratch(out: Tensor) -> Float32Array:
    """Memory of `out`'s shape to compute in: its own where it is float32. Finish with `finish`."""
    return out.numpy() if out.dtype == float32 else np.empty(out.shape, float32)


def finish(out: Tensor, values: Float32Array) -> None:
    """Round what was computed in `scratch(out)` into `out`, if it is not there already."""
    if out.dtype != float32:
        store(out, values)
