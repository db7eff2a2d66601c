"""The products of the backward against float64; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.ops.cuda.linear.sm90 import Plan
from tessera.engine.ops.cuda.training import sm90
from tessera.engine.ops.cuda.training.linear import LinearOps
from tessera.engine.ops.cuda.training.sm90 import PLANS, SM90_TURNED_MATMUL, TurnedPlan
from tessera.engine.tensor import Device, Tensor, bfloat16, float16, float32, from_numpy
from tests.gpu.products.checks import check_guards, guarded
from tests.support.cases.op_cases import random_array

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
HALVES = [bfloat16, float16]
# (rows, columns, summed): one step and less; edges in all directions; whole tiles; fewer columns than a box.
SMALL = [(40, 72, 24), (136, 264, 200), (16, 8, 130)]
# Rows of tiles for several rounds of the blocks; sums of many steps; few rows and many tokens; an odd number of tokens.
SHAPES = [
    (2048, 1040, 776),
    (1032, 768, 4104),
    (16, 4096, 8192),
    (4096, 16, 2049),
    (768, 3072, 3001),
    (304, 50264, 333),
]


@pytest.fixture
def device(cuda_device: CudaDevice) -> CudaDevice:
    if not SM90_TURNED_MATMUL.supports(cuda_device.arch):
        pytest.skip("only sm_90a has these products")
    return cuda_device


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


def name(plan: Plan) -> str:
    return f"{plan.tile.m}x{plan.tile.n}{' shared' if plan.sharing > 1 else ''}"


@pytest.mark.parametrize("turned_x", [False, True], ids=["input", "weight"])
@pytest.mark.parametrize("plan", PLANS, ids=name)
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_plans_small(device: CudaDevice, sizes: tuple[int, int, int], plan: Plan, turned_x: bool) -> None:
    dtype = float16 if plan.sharing > 1 else bfloat16
    check_product(device, sizes, np.dtype(dtype), turned_x=turned_x, plan=TurnedPlan(plan))


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[3], *PLANS[-2:]], ids=name)
def test_slices_small(device: CudaDevice, plan: Plan) -> None:
    """Of unequal numbers of steps; the last step is not whole."""
    check_product(device, (72, 136, 283), np.dtype(bfloat16), turned_x=True, plan=TurnedPlan(plan, slices=3))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("turned_x", [False, True], ids=["input", "weight"])
@pytest.mark.parametrize("plan", PLANS, ids=name)
@pytest.mark.parametrize("sizes", [SHAPES[0], SHAPES[4]], ids=str)
def test_plans(device: CudaDevice, sizes: tuple[int, int, int], plan: Plan, turned_x: bool, dtype: Any) -> None:
    check_product(device, sizes, np.dtype(dtype), turned_x=turned_x, plan=TurnedPlan(plan))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("turned_x", [False, True], ids=["input", "weight"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_chosen_plans(device: CudaDevice, sizes: tuple[int, int, int], turned_x: bool, dtype: Any) -> None:
    check_product(device, sizes, np.dtype(dtype), turned_x=turned_x)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("tokens", "features", "width"), [(37, 16, 40), (70, 9, 24)])
def test_both_ways_of_the_operations_small(
    training: Functions, tokens: int, features: int, width: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, device = training.training, training.device
    assert isinstance(ops, LinearOps)
    monkeypatch.setattr(ops, "reads_in_place", in_place)
    arrays = [random_array(seed, shape, bfloat16) for seed, shape in ((1, (tokens, features)), (2, (tokens, width)))]
    weight = random_array(3, (features, width), bfloat16)
    dy, x, w = (from_numpy(array, device) for array in (*arrays, weight))
    wide_dy, wide_x, wide_w = (array.astype(np.float64) for array in (*arrays, weight))
    dx = ops.matmul_input_gradient(dy, w).numpy().astype(np.float64)
    np.testing.assert_allclose(dx, wide_dy @ wide_w, rtol=1e-2, atol=1e-2 * np.abs(wide_dy @ wide_w).max())
    before = random_array(4, (features, width))
    out = from_numpy(before, device)
    ops.matmul_weight_gradient(dy, x, out, accumulate=True)
    np.testing.assert_allclose(out.numpy(), before + wide_dy.T @ wide_x, rtol=1e-5, atol=1e-4)
