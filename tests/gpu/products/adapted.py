"""Products with adapters beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight, LoraStack
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.candidates import Choice
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.lora.product import launch_adapted
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Accumulate, Activate
from tessera.engine.tensor import bfloat16, from_numpy
from tests.gpu.products.adapters import rows_of, stack_of
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]
PLANS = [plan for plan in sm90.PLANS if plan.tile.warpgroups_m == 1]
RANKS = (16, 9, 0, 16, 3, 16)
PARTS = {"plain": (320,), "parts": (128, 64, 88), "accumulate": (264,), "gate": (136, 136)}


class Always:
    """Chooses this plan."""

    def __init__(self, plan: sm90.Plan) -> None:
        (candidate,) = (each for each in LINEAR.candidates if each.name == "sm90")
        self._choice = Choice(candidate, plan)

    def choose(self, problem: LinearProblem) -> Choice:
        return self._choice


def make_stack(ops: Ops, columns: int, kind: str, num_rows: int, ranks: tuple[int, ...] = RANKS) -> LoraStack:
    """With NaN in the last slot, which no row uses and so no kernel may read."""
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
