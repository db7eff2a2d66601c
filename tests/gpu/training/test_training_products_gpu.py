"""The products of the backward against float64; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.ops.cuda.linear.sm90 import Plan
from tessera.engine.ops.cuda.training.linear import LinearOps
from tessera.engine.ops.cuda.training.sm90 import PLANS, TurnedPlan
from tessera.engine.tensor import bfloat16, float16, from_numpy
from tests.gpu.training.products import check_product
from tests.support.cases.op_cases import random_array

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice
from typing import TYPE_CHECKING

from tessera.engine.ops.cuda.training.sm90 import SM90_TURNED_MATMUL

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice


@pytest.fixture
def device(cuda_device: CudaDevice) -> CudaDevice:
    if not SM90_TURNED_MATMUL.supports(cuda_device.arch):
        pytest.skip("only sm_90a has these products")
    return cuda_device


pytestmark = pytest.mark.gpu

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
