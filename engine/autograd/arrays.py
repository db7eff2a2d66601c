"""Differentiation of NumPy arrays, for exploring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.contract.errors import TesseraError
from tessera.engine.tensor import CPU, FLOAT_DTYPES, Device

Array = np.ndarray[Any, Any]


def value_and_gradients(
    function: Callable[..., Variable], *arrays: Array, device: Device = CPU
) -> tuple[float, tuple[Array, ...]]:
    """The number that `function(functions, *variables)` computes from the arrays, and its gradient by each of them.

    Arrays of float64 are computed in float32. The gradients are float32.

    Raises: TesseraError where an array has no float dtype, or the function returns no single number.
    """
    functions = Functions.on(device)
    variables = [functions.variable(_as_float(array)) for array in arrays]
    result = function(functions, *variables)
    if result.value.size != 1:
        raise TesseraError(f"the function must return a single number, not {result!r}")
    if result.requires_grad:
        functions.backward(result)
    gradients = (
        np.zeros(variable.shape, np.float32) if variable.gradient is None else variable.gradient.numpy()
        for variable in variables
    )
    return float(result.value.numpy().reshape(())), tuple(gradients)


def _as_float(array: Array) -> Array:
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype not in FLOAT_DTYPES:
        raise TesseraError(f"an array of {array.dtype} has no gradient: use float32, float16 or bfloat16")
    return array
