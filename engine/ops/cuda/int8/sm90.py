"""Products of int8 rows with TMA and wgmma of sm_90a: plans of `sm90_int8_matmul_kernel`.

The kernel is that of e4m3 but for its sums, so are its plans, and a product is a `Fp8Problem` without groups.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.ops.cuda.fp8.problem import Fp8Problem
from tessera.engine.ops.cuda.fp8.sm90 import (
    SHARING,
    TILES,
    ScaledOperands,
    Sm90ScaledMatmulParams,
    choose_plan,
    launch_scaled,
    may_share,
    plans_for,
)
from tessera.engine.ops.cuda.linear.costs import costs_of
from tessera.engine.ops.cuda.linear.quantize_rows import INT8_GROUP
from tessera.engine.ops.cuda.linear.sm90 import MULTIPLE, Plan, clusters_at_once_of
from tessera.engine.ops.cuda.linear.sm90_kernels import TILE_K

SM90_INT8_MATMUL = KernelSpec(
    file="quant/sm90_int8_matmul.cu",
    name="sm90_int8_matmul_kernel",
    template=("T", "Out", "WARPGROUPS_M", "WARPGROUP_N", "SHARING"),
    params=Sm90ScaledMatmulParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_INT8_MATMUL,)
STEP = 2 * TILE_K  # columns of a stage of the ring
GROUP_STEPS = Constant(INT8_GROUP // STEP, "stages of a group of columns")
declare_header("sm90_int8_matmul", __name__, {"GROUP_STEPS": GROUP_STEPS})


@lru_cache(maxsize=16)
def count_clusters_at_once(device: CudaDevice, dtype: str) -> tuple[int, ...]:
    """As `linear.sm90.count_clusters_at_once`."""
    return clusters_at_once_of(device, SM90_INT8_MATMUL, Plan(TILES[-1]).template(dtype, dtype))


def plan_of(device: CudaDevice, problem: Fp8Problem) -> Plan | None:
    """None where the kernel does not do this."""
    if not SM90_INT8_MATMUL.supports(device.arch) or problem.out_dtype == "float" or problem.in_order:
        return None
    if problem.features % MULTIPLE or problem.in_features % STEP or not problem.out_aligned:
        return None
    clusters, costs = count_clusters_at_once(device, problem.dtype), costs_of(device).sm90
    return choose_plan(problem, clusters, costs, max_shared_bytes=device.max_shared_bytes, group_steps=int(GROUP_STEPS))


def launch(device: CudaDevice, problem: Fp8Problem, plan: Plan, operands: ScaledOperands) -> None:
    """x as `quantize_rows.as_integers` gives it, by a weight with a scale for each row."""
    at_once = count_clusters_at_once(device, problem.dtype)[plan.cluster - 1]
    kernel = (SM90_INT8_MATMUL, plan.template(problem.dtype, problem.out_dtype))
    launch_scaled(device, kernel, problem, plan, at_once, operands)


def kernels_of(dtype: str) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    kernels: dict[Instantiation, None] = {}
    for plan in plans_for(groups=False, logits=False):
        for used in (plan, replace(plan, sharing=SHARING)) if may_share(plan) else (plan,):
            kernels[SM90_INT8_MATMUL, used.template(dtype, dtype)] = None
    return list(kernels)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    return [kernel for dtype in dtypes if dtype != "float" for kernel in kernels_of(dtype)]
