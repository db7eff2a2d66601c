"""The matrix product of sm_90a against NumPy, with every plan, and beside the portable kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from engine.ops.cpu import CpuOps
from engine.ops.cuda import CudaOps
from engine.ops.cuda.matmul_hopper import (
    LOGITS_PLANS,
    LOGITS_SHARING_PLANS,
    MATMUL_HOPPER,
    MIN_ROWS,
    MIN_ROWS_AHEAD,
    PLANS,
    SHARING_PLANS,
    WIDE_PLAN,
    Plan,
    launch,
)
from engine.tensor import CPU, Tensor, bfloat16, empty, float16, float32, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.op_cases import poisoned, random_array
from tests.reference import assert_close

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu

HALVES = [bfloat16, float16]

# (rows, in_features, columns): whole tiles; edges in all directions; less than a step; fewer columns than a pair
# of tiles; several tiles for each block; few rows.
SHAPES = [(128, 1024, 512), (129, 1096, 1000), (300, 1032, 264), (65, 1544, 16), (700, 1024, 4104), (17, 1032, 520)]
# For blocks that take rows of tiles in pairs: fewer steps than stages; one step; an odd number of rows of tiles and
# several pairs for some clusters; more rows than share the weight in L2.
SHARING_SHAPES = [*SHAPES, (200, 136, 512), (257, 64, 1008), (1000, 1544, 2064), (2100, 1024, 4112)]
PAIRED = (*SHARING_PLANS, WIDE_PLAN)
CASES = [(plan, index) for plan in PLANS for index in range(len(SHAPES))]
CASES += [(plan, index) for plan in PAIRED for index in range(len(SHARING_SHAPES))]


@pytest.fixture
def hopper(cuda_ops: CudaOps) -> CudaOps:
    if not MATMUL_HOPPER.supports(cuda_ops.device.arch):
        pytest.skip(f"{cuda_ops.device.arch} is not sm_90a")
    return cuda_ops


@pytest.fixture
def portable(cuda_ops: CudaOps) -> Iterator[CudaOps]:
    """The same operations without the kernel of sm_90a."""
    ops = CudaOps(cuda_ops.device)
    ops.hopper_matmul = False
    return ops


def name(plan: Plan) -> str:
    return f"{plan.tile.m}x{plan.tile.n}x{plan.splits}" + (f"-{plan.sharing}" if plan.sharing > 1 else "")


def guarded(shape: tuple[int, ...], dtype: np.dtype[np.generic], ops: CudaOps) -> tuple[Tensor, Tensor]:
    """A tensor of NaN with a row of NaN before and after it, and these three together."""
    whole = poisoned((shape[0] + 2, shape[1]), dtype, ops.device)
    return whole[1 : shape[0] + 1], whole


@dataclass(frozen=True)
class Product:
    """Inputs of one shape and what NumPy makes of them."""

    x: Array
    weight: Array
    bias: Array
    residual: Array
    plain: Array  # with bias
    added: Array  # with bias, to the residual
    gated: Array | None


@lru_cache(maxsize=len(SHARING_SHAPES))
def product(index: int) -> Product:
    m, k, n = SHARING_SHAPES[index]
    dtype, ops = HALVES[index % 2], CpuOps()
    x, weight = random_array(1, (m, k), dtype), random_array(2, (n, k), dtype, k**-0.5)
    bias, residual = random_array(3, (n,), dtype), random_array(4, (m, n), dtype)
    inputs = [from_numpy(array, CPU) for array in (x, weight, bias)]
    added = ops.matmul(*inputs, from_numpy(residual, CPU), accumulate=True).numpy()
    gated = None
    if n % 16 == 0:
        gated = ops.matmul_silu_mul(*inputs[:2], gate_up=empty((m, n), dtype, CPU)).numpy()
    return Product(x, weight, bias, residual, ops.matmul(*inputs).numpy(), added, gated)


@pytest.mark.parametrize(("plan", "index"), CASES, ids=lambda part: name(part) if isinstance(part, Plan) else str(part))
def test_every_plan(plan: Plan, index: int, hopper: CudaOps, no_transfers: NoTransfers) -> None:
    case = product(index)
    dtype, device, shape = case.x.dtype, hopper.device, case.plain.shape
    x, weight, bias = (from_numpy(array, device) for array in (case.x, case.weight, case.bias))

    out, whole = guarded(shape, dtype, hopper)
    with no_transfers():
        launch(device, plan, x, weight, bias, out)
    assert_close(out.numpy(), case.plain, dtype)
    assert np.isnan(whole.numpy()[[0, -1]].astype(np.float32)).all(), "a row beyond the result was written"

    residual = from_numpy(case.residual, device)
    launch(device, plan, x, weight, bias, residual, accumulate=True)
    assert_close(residual.numpy(), case.added, dtype)

    if case.gated is not None:
        out, whole = guarded(case.gated.shape, dtype, hopper)
        launch(device, plan, x, weight, None, out, silu_mul=True)
        assert_close(out.numpy(), case.gated, dtype, roundings=2)  # here once, the reference also before the gate
        assert np.isnan(whole.numpy()[[0, -1]].astype(np.float32)).all()


@pytest.mark.parametrize("plan", [*LOGITS_PLANS, *LOGITS_SHARING_PLANS], ids=name)
def test_every_plan_for_logits(plan: Plan, hopper: CudaOps, cpu_ops: CpuOps) -> None:
    for m, k, n in SHARING_SHAPES if plan.sharing > 1 else SHAPES:
        x, weight = random_array(5, (m, k), bfloat16), random_array(6, (n, k), bfloat16, k**-0.5)
        out, whole = guarded((m, n), float32, hopper)
        launch(hopper.device, plan, *(from_numpy(array, hopper.device) for array in (x, weight)), None, out)
        expected = cpu_ops.matmul(from_numpy(x, CPU), from_numpy(weight, CPU), out=empty((m, n), float32, CPU))
        assert_close(out.numpy(), expected.numpy(), float32, typical=4)
        assert np.isnan(whole.numpy()[[0, -1]]).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k", [8, 72, 1024])
@pytest.mark.parametrize("m", [MIN_ROWS_AHEAD, MIN_ROWS, 64, 129, 300])
def test_both_paths_of_the_operations(
    m: int, k: int, dtype: np.dtype[np.generic], cuda_ops: CudaOps, portable: CudaOps, cpu_ops: CpuOps
) -> None:
    n = 272
    x, weight = random_array(7, (m, k), dtype), random_array(8, (n, k), dtype, k**-0.5)
    residual = random_array(9, (m, n), dtype)
    results: list[list[Array]] = []
    for ops in (cpu_ops, cuda_ops, portable):
        device = CPU if ops is cpu_ops else cuda_ops.device
        a, b, c = (from_numpy(array, device) for array in (x, weight, residual))
        gated = ops.matmul_silu_mul(a, b, gate_up=poisoned((m, n), dtype, device))
        logits = ops.matmul(a, b, out=poisoned((m, n), float32, device))
        ops.matmul(a, b, out=c, accumulate=True)
        results.append([gated.numpy(), logits.numpy(), c.numpy()])
    for actual in results[1:]:
        for result, expected, kind in zip(actual, results[0], (dtype, float32, dtype), strict=True):
            assert_close(result, expected, kind, typical=4)


@pytest.mark.parametrize("plan", [*(plan for plan in PLANS if plan.splits <= 2), *PAIRED], ids=name)
def test_a_broken_row_keeps_to_itself(plan: Plan, hopper: CudaOps) -> None:
    x, weight = random_array(10, (200, 128), bfloat16), random_array(11, (264, 128), bfloat16)
    x[70] = np.nan
    out, _whole = guarded((200, 264), bfloat16, hopper)
    launch(hopper.device, plan, from_numpy(x, hopper.device), from_numpy(weight, hopper.device), None, out)
    assert np.isnan(out.numpy().astype(np.float32)).any(1).nonzero()[0].tolist() == [70]


def test_kernels_of_a_graph_wait_for_what_they_read(hopper: CudaOps) -> None:
    """Each product of a chain reads what the one before wrote, and may start before that one has ended."""
    device, layers, width = hopper.device, 8, 512
    weights = [from_numpy(random_array(i, (width, width), bfloat16, width**-0.5), device) for i in range(layers)]
    rows = [from_numpy(random_array(20 + i, (192, width), bfloat16), device) for i in range(layers + 1)]
    for plan in (Plan(PLANS[0].tile), *(p for p in PLANS if p.splits == 2), *PAIRED):

        def chain(plan: Plan = plan) -> None:
            for i, weight in enumerate(weights):
                launch(device, plan, rows[i], weight, None, rows[i + 1])

        chain()
        expected = rows[-1].numpy().copy()
        with device.capture() as finish:
            chain()
        graph = finish()
        for _ in range(10):
            for tensor in rows[1:]:
                device.fill_bytes(tensor.pointer, 255, tensor.nbytes)
            graph.launch()
            np.testing.assert_array_equal(rows[-1].numpy().view(np.uint16), expected.view(np.uint16))
