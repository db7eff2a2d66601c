"""Products of few rows that add those of their adapters, against the CPU and against the product without adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.problem import LinearOperands, LinearProblem
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.cuda.lora.kernels import SM90_ADAPTED_MATMUL
from tessera.engine.ops.cuda.lora.product import launch_adapted
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Accumulate, Activate, Epilogue, Prologue, RMSNorm
from tessera.engine.tensor import bfloat16, empty, from_numpy
from tests.gpu.products.adapted import PARTS, PLANS, RANKS, Always, Array, check_adapted_product, make_stack
from tests.gpu.products.adapters import rows_of, stack_of
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.references.reference import assert_close


@pytest.fixture
def sm90_ops(cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    monkeypatch.setattr(choices, "FUSES_PRODUCTS", True)
    if not SM90_ADAPTED_MATMUL.supports(cuda_ops.device.arch):
        pytest.skip(f"{cuda_ops.device.arch} is not sm_90a")
    return cuda_ops


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.tile.n}x{plan.splits}")
def test_a_product_adds_its_adapters_small(plan: sm90.Plan, kind: str, sm90_ops: CudaOps, cpu_ops: CpuOps) -> None:
    check_adapted_product(plan, kind, sm90_ops, cpu_ops)


@pytest.mark.parametrize("fuses_gates", [True, False])
def test_layers_products_of_few_rows_small(
    fuses_gates: bool, sm90_ops: CudaOps, cpu_ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, a gate and the product behind it, by the operations; without adapters rows have the same bits."""
    monkeypatch.setattr(choices, "FUSES_GATES", fuses_gates)
    num_rows, hidden, inner, ranks = 40, 136, 192, (16, 5, 16)
    slots = np.random.default_rng(3).integers(-1, len(ranks), num_rows)
    x, gains = random_array(1, (num_rows, hidden), bfloat16, 3.0), random_array(2, (hidden,), bfloat16)
    ups = random_array(3, (2 * inner, hidden), bfloat16, hidden**-0.5)
    downs = random_array(4, (hidden, inner), bfloat16, inner**-0.5)

    def run(ops: Ops, adapts: bool) -> Array:
        device = ops.device
        stack = stack_of(ops, bfloat16, hidden, (inner, inner), ranks, 16, num_rows, room=8)
        following = replace(stack_of(ops, bfloat16, inner, (hidden,), ranks, 16, 1), selection=stack.selection)
        up = LinearWeight.of(from_numpy(ups, device))
        down = LinearWeight.of(from_numpy(downs, device))
        if adapts:
            up, down = replace(up, adapters=stack), replace(down, adapters=following)
            stack.selection.rows = rows_of(ops, slots, len(ranks))
        stream = from_numpy(x, device)
        norm: Prologue = RMSNorm(from_numpy(gains, device), 1e-5, poisoned(stream.shape, bfloat16, device))
        gate: Epilogue = Activate("silu_mul", poisoned((num_rows, 2 * inner), bfloat16, device), down)
        activated = poisoned((num_rows, inner), bfloat16, device)
        ops.linear(stream, up, prologue=norm, epilogue=gate, out=activated)
        out = from_numpy(x.copy(), device)
        ops.linear(activated, down, epilogue=Accumulate(), out=out)
        return out.numpy().copy()

    launched: list[str] = []
    launch = sm90_ops.device.launch

    def noted(spec: KernelSpec[Any], *rest: Any) -> None:
        launched.append(spec.name)
        launch(spec, *rest)

    monkeypatch.setattr(sm90_ops.device, "launch", noted)
    ours = run(sm90_ops, adapts=True)
    assert launched.count("lora_shrink_norm_kernel") == 1
    assert launched.count("sm90_adapted_matmul_kernel") == (2 if fuses_gates else 1)
    assert launched.count("lora_expand_kernel") == (0 if fuses_gates else 1)
    assert_close(ours, run(cpu_ops, adapts=True), bfloat16, roundings=3)
    if fuses_gates:
        np.testing.assert_array_equal(ours[slots < 0], run(sm90_ops, adapts=False)[slots < 0])


def test_a_broken_row_and_others_adapters_keep_to_themselves_small(sm90_ops: CudaOps) -> None:
    num_rows, columns = 33, 136
    plan = PLANS[1]
    slots = np.random.default_rng(5).integers(-1, len(RANKS) - 1, num_rows)
    slots[:3] = (0, 3, -1)
    x = random_array(1, (num_rows, columns), bfloat16)
    broken = x.copy()
    broken[0] = np.nan
    values = random_array(2, (320, columns), bfloat16, columns**-0.5)

    def run(inputs: Array, chosen: Array) -> Array:
        device = sm90_ops.device
        stream, weight = from_numpy(inputs, device), from_numpy(values, device)
        stack = make_stack(sm90_ops, columns, "plain", num_rows)
        rows, out = rows_of(sm90_ops, chosen, len(RANKS)), empty((num_rows, 320), bfloat16, device)
        sm90_ops._begin_adapters(stream, stack, rows, out)
        operands = LinearOperands(stream, weight, None, out)
        chooser: Any = Always(plan)
        problem = LinearProblem.of(operands)
        assert launch_adapted(sm90_ops.device, chooser, problem, operands, stack, rows, of_norm=False, begun=None)
        return out.numpy().copy()

    whole = run(x, slots)
    np.testing.assert_array_equal(run(broken, slots)[1:], whole[1:])
    fewer = slots.copy()
    fewer[3:] = -1
    np.testing.assert_array_equal(run(x, fewer)[:3], whole[:3])
