"""Products of few rows that add those of their adapters, against the CPU and against the product without adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.formats import LinearWeight, LoraStack
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.candidates import Choice
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.cuda.lora.kernels import SM90_ADAPTED_MATMUL
from tessera.engine.ops.cuda.lora.product import launch_adapted
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Accumulate, Activate, Epilogue, Prologue, RMSNorm
from tessera.engine.tensor import bfloat16, empty, from_numpy
from tests.gpu.products.test_lora_gpu import rows_of, stack_of
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.references.reference import assert_close

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]

PLANS = [plan for plan in sm90.PLANS if plan.tile.warpgroups_m == 1]
RANKS = (16, 9, 0, 16, 3, 16)
PARTS = {"plain": (320,), "parts": (128, 64, 88), "accumulate": (264,), "gate": (136, 136)}


@pytest.fixture
def sm90_ops(cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    monkeypatch.setattr(choices, "FUSES_PRODUCTS", True)
    if not SM90_ADAPTED_MATMUL.supports(cuda_ops.device.arch):
        pytest.skip(f"{cuda_ops.device.arch} is not sm_90a")
    return cuda_ops


class Always:
    """Chooses this plan."""

    def __init__(self, plan: sm90.Plan) -> None:
        (candidate,) = (each for each in LINEAR.candidates if each.name == "sm90")
        self._choice = Choice(candidate, plan)

    def choose(self, problem: LinearProblem) -> Choice:
        return self._choice


def make_stack(ops: Ops, columns: int, kind: str, num_rows: int, ranks: tuple[int, ...] = RANKS) -> LoraStack:
    """Nobody may read the last slot, which no row names, nor sums behind a slot's rank."""
    stack = stack_of(ops, bfloat16, columns, PARTS[kind], ranks, 16, num_rows, room=4)
    b = stack.b.numpy().copy()
    b[-1] = np.nan
    stack.b.upload(b)
    return stack


def check_adapted_product(plan: sm90.Plan, kind: str, sm90_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Rows without an adapter, or with one of other weights alone, have the product's bits."""
    num_rows, columns = 35 if kind != "parts" else 64, 1096
    slots = np.random.default_rng(plan.splits).integers(-1, len(RANKS) - 1, num_rows)
    features, gated = sum(PARTS[kind]), kind == "gate"
    x = random_array(1, (num_rows, columns), bfloat16)
    values = random_array(2, (features, columns), bfloat16, columns**-0.5)
    bias = None if gated or kind == "parts" else random_array(3, (features,), bfloat16)
    before = random_array(4, (num_rows, features // (2 if gated else 1)), bfloat16)
    epilogue = Accumulate() if kind == "accumulate" else None

    def adapt(ops: Ops) -> tuple[Array, Array]:
        """With adapters and without."""
        device, found = ops.device, []
        weight = LinearWeight.of(from_numpy(values, device), None if bias is None else from_numpy(bias, device))
        stack = make_stack(ops, columns, kind, num_rows)
        rows = rows_of(ops, slots, len(RANKS))
        for adapts in (True, False):
            stream, out = from_numpy(x, device), from_numpy(before.copy(), device)
            activate = Activate("silu_mul", poisoned((num_rows, features), bfloat16, device)) if gated else epilogue
            stack.selection.rows = rows if adapts else None
            if isinstance(ops, CpuOps):
                ops.linear(stream, replace(weight, adapters=stack), epilogue=activate, out=out)
            elif adapts:
                assert isinstance(ops, CudaOps)
                product = out if not isinstance(activate, Activate) else activate.scratch
                ops._begin_adapters(stream, stack, rows, product)
                operands = LinearOperands(stream, weight.dense, weight.bias, out)  # type: ignore[arg-type]
                problem = LinearProblem.of(operands, gated=gated, accumulates=epilogue is not None)
                chooser: Any = Always(plan)
                assert launch_adapted(ops.device, chooser, problem, operands, stack, rows, of_norm=False, begun=None)
            else:
                sm90.launch(
                    sm90_ops.device,
                    plan,
                    stream,
                    weight.dense,  # type: ignore[arg-type]
                    weight.bias,
                    out,
                    accumulate=epilogue is not None,
                    silu_mul=gated,
                )
            found.append(out.numpy().copy())
        return found[0], found[1]

    ours, alone = adapt(sm90_ops)
    assert_close(ours, adapt(cpu_ops)[0], bfloat16, roundings=3 if gated else 2)
    without = (slots < 0) | (slots == 2)
    np.testing.assert_array_equal(ours[without], alone[without])
    changed = (ours != alone).any(axis=1)
    assert changed[~without & (slots > 0)].all()


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
