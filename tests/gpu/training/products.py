"""Products of training."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.engine.ops.cuda.training import sm90
from tessera.engine.ops.cuda.training.sm90 import TurnedPlan
from tessera.engine.tensor import Device, Tensor, bfloat16, float16, float32
from tests.gpu.products.checks import check_guards, guarded
from tests.support.cases.op_cases import random_array

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice


Array = np.ndarray[Any, Any]


def among_nan(array: Array, device: Device) -> Tensor:
    """On the device, with rows of NaN before and after it."""
    tensor, _ = guarded(array.shape, array.dtype, device)
    tensor.upload(array)
    return tensor


class Product(NamedTuple):
    """Operands as they lie, their product in float64, and the product of their sizes."""

    left: Array
    right: Array
    expected: Array
    size: Array


@lru_cache(maxsize=4)
def product_of(sizes: tuple[int, int, int], dtype: np.dtype[Any], turned_x: bool) -> Product:
    rows, columns, summed = sizes
    if not turned_x:
        summed += -summed % 8  # the columns of x
    left = random_array(1, (summed, rows) if turned_x else (rows, summed), dtype)
    right = random_array(2, (summed, columns), dtype)
    x, weight = (left.T if turned_x else left).astype(np.float64), right.astype(np.float64)
    return Product(left, right, x @ weight, np.abs(x) @ np.abs(weight))


def check_product(
    device: CudaDevice,
    sizes: tuple[int, int, int],
    dtype: np.dtype[Any],
    *,
    turned_x: bool,
    plan: TurnedPlan | None = None,
) -> None:
    """Right to rounding, written nowhere else, the same bits each time; to floats it is added where that is asked."""
    left, right, expected, size = product_of(sizes, dtype, turned_x)
    out_dtype = np.dtype(float32 if turned_x else dtype)
    x, weight = among_nan(left, device), among_nan(right, device)
    unit = float(np.ldexp(1.0, {float32: -23, float16: -10, bfloat16: -7}[out_dtype]))
    found = []
    for _ in range(2):
        out, whole = guarded(expected.shape, out_dtype, device)
        sm90.launch(device, x, weight, out, turned_x=turned_x, plan=plan)
        check_guards(whole)
        found.append(out.numpy())
    np.testing.assert_array_equal(found[0], found[1])
    assert_within(found[0], expected, 4e-6 * size + unit * np.abs(expected))
    if turned_x:
        sm90.launch(device, x, weight, out, turned_x=True, accumulate=True, plan=plan)
        check_guards(whole)
        assert_within(out.numpy(), 2 * expected, 8e-6 * size + 2 * unit * np.abs(expected))


def assert_within(found: Array, expected: Array, most: Array) -> None:
    assert np.isfinite(found).all()
    excess = np.abs(found.astype(np.float64) - expected) - most
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    assert excess[worst] <= 0, f"{(excess > 0).sum()} differ, at {worst} {found[worst]} is not {expected[worst]}"
