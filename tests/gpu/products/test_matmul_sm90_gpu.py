"""The matrix product of sm_90a against NumPy, with every plan, and beside the portable kernels."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.linear.costs import H200
from tessera.engine.ops.cuda.linear.sm90 import (
    LOGITS_PLANS,
    LOGITS_SHARING_PLANS,
    PLANS,
    SHARING_PLANS,
    WIDE_PLAN,
    Plan,
    launch,
)
from tessera.engine.ops.cuda.linear.sm90_kernels import SM90_MATMUL
from tessera.engine.tensor import CPU, float32, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.gpu.products.checks import (
    HALVES,
    SHAPES,
    SHARING_SHAPES,
    Array,
    check_guards,
    check_logits,
    check_product,
    check_that_a_broken_row_keeps_to_itself,
    check_that_a_chain_waits,
    guarded,
    product,
)
from tests.support.cases.linear_calls import product_silu_mul
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.references.reference import assert_close

pytestmark = pytest.mark.gpu

PAIRED = (*SHARING_PLANS, WIDE_PLAN)
CASES = [(plan, index) for plan in PLANS for index in range(len(SHAPES))]
CASES += [(plan, index) for plan in PAIRED for index in range(len(SHARING_SHAPES))]


@pytest.fixture
def sm90(cuda_ops: CudaOps) -> CudaOps:
    if not SM90_MATMUL.supports(cuda_ops.device.arch):
        pytest.skip(f"{cuda_ops.device.arch} is not sm_90a")
    return cuda_ops


@pytest.fixture
def portable(cuda_ops: CudaOps) -> CudaOps:
    """The same operations without the kernel of sm_90a."""
    ops = CudaOps(cuda_ops.device)
    ops.linear_kernels.restrict(without=("sm90", "sm90_wide"))
    return ops


def name(plan: Plan) -> str:
    return f"{plan.tile.m}x{plan.tile.n}x{plan.splits}" + (f"-{plan.sharing}" if plan.sharing > 1 else "")


@pytest.mark.parametrize(("plan", "index"), CASES, ids=lambda part: name(part) if isinstance(part, Plan) else str(part))
def test_every_plan(plan: Plan, index: int, sm90: CudaOps, no_transfers: NoTransfers) -> None:
    case, device = product(index), sm90.device
    check_product(case, partial(launch, device, plan), device, no_transfers)
    if case.gated is not None:
        out, whole = guarded(case.gated.shape, case.x.dtype, device)
        x, weight = (from_numpy(array, device) for array in (case.x, case.weight))
        launch(device, plan, x, weight, None, out, silu_mul=True)
        # Rounded once here, by the reference also before the gate.
        assert_close(out.numpy(), case.gated, case.x.dtype, roundings=2)
        launch(device, plan, x, weight, None, out, gelu_mul=True)
        assert case.gated_by_gelu is not None
        assert_close(out.numpy(), case.gated_by_gelu, case.x.dtype, roundings=2)
        check_guards(whole)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("plan", [*LOGITS_PLANS, *LOGITS_SHARING_PLANS], ids=name)
def test_every_plan_for_logits(plan: Plan, dtype: np.dtype[np.generic], sm90: CudaOps) -> None:
    for shape in SHARING_SHAPES if plan.sharing > 1 else SHAPES:
        check_logits(shape, dtype, partial(launch, sm90.device, plan), sm90.device)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k", [8, 72, 1024])
@pytest.mark.parametrize("m", [H200.sm90.min_rows_where_ahead, H200.sm90.min_rows, 64, 129, 300])
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
        gated = product_silu_mul(ops, a, b, gate_up=poisoned((m, n), dtype, device))
        logits = ops.matmul(a, b, out=poisoned((m, n), float32, device))
        ops.matmul(a, b, out=c, accumulate=True)
        results.append([gated.numpy(), logits.numpy(), c.numpy()])
    for actual in results[1:]:
        for result, expected, kind in zip(actual, results[0], (dtype, float32, dtype), strict=True):
            assert_close(result, expected, kind, typical=4)


@pytest.mark.parametrize("plan", [*(plan for plan in PLANS if plan.splits <= 2), *PAIRED], ids=name)
def test_a_broken_row_keeps_to_itself(plan: Plan, sm90: CudaOps) -> None:
    check_that_a_broken_row_keeps_to_itself(partial(launch, sm90.device, plan), sm90.device)


def test_kernels_of_a_graph_wait_for_what_they_read(sm90: CudaOps) -> None:
    for plan in (Plan(PLANS[0].tile), *(p for p in PLANS if p.splits == 2), *PAIRED):
        check_that_a_chain_waits(partial(launch, sm90.device, plan), sm90.device)
