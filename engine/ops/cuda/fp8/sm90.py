"""Products of e4m3 rows with TMA and wgmma of sm_90a: plans of `sm90_fp8_matmul_kernel`.

The kernel is that of 16-bit elements but for its sums, so are its plans: a pair of e4m3 is one of those elements.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InFloat, InT, Int32, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import box_map
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, Fp8Operands, Fp8Problem
from tessera.engine.ops.cuda.linear.costs import Sm90Costs, costs_of
from tessera.engine.ops.cuda.linear.quantize_rows import GROUP
from tessera.engine.ops.cuda.linear.sm90 import (
    MAX_CLUSTER,
    MIN_SPLIT_STEPS,
    MULTIPLE,
    ROWS_IN_L2,
    Plan,
    Tile,
    clusters_at_once_of,
)
from tessera.engine.ops.cuda.linear.sm90_kernels import SPLITTABLE_N, TILE_K, WGMMA_M
from tessera.engine.ops.cuda.types import HALF_BYTES, ceil_div
from tessera.engine.tensor import Tensor, bfloat16


class Sm90ScaledMatmulParams(NamedTuple):
    """Of products of e4m3, and of int8."""

    x_map: TensorMap
    x_tail_map: TensorMap
    weight_map: TensorMap
    x_scales: InFloat
    weight_scales: InFloat
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    splits: Int32
    tiles_m_in_l2: Int32
    stages: Int32
    accumulate: Int32
    silu_mul: Int32


SM90_FP8_MATMUL = KernelSpec(
    file="fp8/sm90_fp8_matmul.cu",
    name="sm90_fp8_matmul_kernel",
    template=("T", "Out", "WARPGROUPS_M", "WARPGROUP_N", "SHARING", "BLOCKS"),
    params=Sm90ScaledMatmulParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_FP8_MATMUL,)
declare_header("sm90_scaled_matmul", __name__, params=(Sm90ScaledMatmulParams,))
declare_header("sm90_fp8_matmul", __name__, {"SCALES": GROUP})

TILES = (Tile(2, 192), Tile(2, 160), Tile(2, 128), Tile(2, 96), Tile(2, 64), Tile(1, 64), Tile(1, 32))
GROUP_TILES = (Tile(2, 128), Tile(2, 64), Tile(1, 64), Tile(1, 32))
LOGITS_TILES = (Tile(2, 128), Tile(1, 64))
STEP_US = {(2, 160): 0.43}  # of tiles that 16-bit products have not; the others take as long as those
# Blocks of a cluster that read each tile of the weight once: 2 or 4. More read less from L2, and wait for each other.
SHARING = 2
MIN_ROWS = 17  # fewer are bound by reading the weight


def plans_for(*, groups: bool, logits: bool) -> tuple[Plan, ...]:
    """Without those of pairs of blocks that share."""
    tiles = [tile for tile in (LOGITS_TILES if logits else TILES) if not groups or tile in GROUP_TILES]
    return tuple(Plan(tile, splits) for tile in tiles for splits in range(1, 1 + _most_splits(tile, logits=logits)))


def _most_splits(tile: Tile, *, logits: bool) -> int:
    return 1 if logits or tile.warpgroup_n > SPLITTABLE_N else min(MAX_CLUSTER, tile.warpgroup_n // 16)


def may_share(plan: Plan) -> bool:
    """Whether blocks of a cluster may read each tile of the weight once."""
    return plan.splits == 1 and plan.tile.warpgroups_m == 2 and plan.tile.warpgroup_n >= 128


def template_of(plan: Plan, dtype: str, out_dtype: str, *, groups: bool) -> tuple[str, ...]:
    return (*plan.template(dtype, out_dtype), "true" if groups else "false")


def choose_plan(
    problem: Fp8Problem,
    clusters_at_once: tuple[int, ...],
    costs: Sm90Costs,
    *,
    max_shared_bytes: int,
    group_steps: int = 1,
) -> Plan | None:
    """The plan of least cost; `clusters_at_once[s - 1]` clusters of s blocks run at a time.

    A split of k begins with a multiple of `group_steps`.
    """
    num_rows, pairs = problem.num_rows, problem.in_features // 2
    steps = ceil_div(pairs, TILE_K)
    shares = num_rows >= costs.min_sharing_rows and clusters_at_once[SHARING - 1] > 0
    step_us = {**costs.step_us, **STEP_US}
    costs = replace(costs, step_us=step_us)

    def runs(plan: Plan) -> bool:
        if num_rows <= plan.tile.m - WGMMA_M:  # a warp group's rows would be none
            return False
        if problem.groups and problem.gated and problem.features % (plan.tile.warpgroup_n // 2):
            return False
        if plan.stages(problem.out_itemsize, max_shared_bytes) < 2:
            return False
        if plan.splits == 1:
            return True
        whole = not problem.in_order and plan.splits * MIN_SPLIT_STEPS <= steps
        ends_groups = group_steps == 1 or steps % (plan.splits * group_steps) == 0
        return whole and ends_groups and clusters_at_once[plan.splits - 1] > 0

    def cost(plan: Plan) -> float:
        return plan.cost(num_rows, problem.weight_rows, pairs, clusters_at_once[plan.cluster - 1], costs)

    plans = filter(runs, plans_for(groups=problem.groups, logits=problem.out_dtype == "float"))
    used = (replace(plan, sharing=SHARING) if shares and may_share(plan) else plan for plan in plans)
    return min(used, key=cost, default=None)


@lru_cache(maxsize=16)
def count_clusters_at_once(device: CudaDevice, dtype: str) -> tuple[int, ...]:
    """As `linear.sm90.count_clusters_at_once`."""
    return clusters_at_once_of(device, SM90_FP8_MATMUL, template_of(Plan(TILES[-1]), dtype, dtype, groups=False))


def _accepts(problem: Fp8Problem, device: CudaDevice) -> Plan | None:
    if not SM90_FP8_MATMUL.supports(device.arch) or problem.from_x:
        return None
    if problem.num_rows < MIN_ROWS and not problem.in_order:
        return None
    if problem.features % MULTIPLE or not problem.out_aligned:
        return None
    if problem.out_dtype == "float" and (problem.gated or problem.accumulates or problem.biased):
        return None
    clusters, costs = count_clusters_at_once(device, problem.dtype), costs_of(device).sm90
    return choose_plan(problem, clusters, costs, max_shared_bytes=device.max_shared_bytes)


def as_pairs(matrix: Tensor) -> Tensor:
    """The same bytes [rows, columns] as elements of 2 bytes [rows, columns / 2]."""
    rows, columns = matrix.shape
    return Tensor(matrix.buffer, (rows, columns // HALF_BYTES), bfloat16, matrix.offset)


class Scaled(NamedTuple):
    """A matrix of bytes [rows, columns] with scales in float32."""

    values: Tensor
    scales: Tensor


class ScaledOperands(NamedTuple):
    """As `Fp8Operands`, of several rows."""

    x: Scaled
    weight: Scaled
    bias: Tensor | None
    out: int
    out_stride: int


def _launch(device: CudaDevice, problem: Fp8Problem, plan: Plan, operands: Fp8Operands) -> None:
    assert operands.values is not None
    assert operands.scales is not None
    x = Scaled(operands.values, operands.scales)
    tensors = operands.part.tensors
    weight = Scaled(tensors["values"], tensors["scales"])
    at_once = count_clusters_at_once(device, problem.dtype)[plan.cluster - 1]
    kernel = (SM90_FP8_MATMUL, template_of(plan, problem.dtype, problem.out_dtype, groups=problem.groups))
    scaled = ScaledOperands(x, weight, operands.bias, operands.out, operands.out_stride)
    launch_scaled(device, kernel, problem, plan, at_once, scaled)


def launch_scaled(
    device: CudaDevice, kernel: Instantiation, problem: Fp8Problem, plan: Plan, at_once: int, operands: ScaledOperands
) -> None:
    """`at_once`: clusters that the device runs at a time."""
    num_rows = problem.num_rows
    x, weight = as_pairs(operands.x.values), as_pairs(operands.weight.values)
    config = plan.config(num_rows, problem.weight_rows, problem.out_itemsize, at_once, device.max_shared_bytes)
    params = Sm90ScaledMatmulParams(
        x_map=box_map(x, plan.tile.m),
        x_tail_map=box_map(x, num_rows % plan.tile.m or plan.tile.m),
        weight_map=box_map(weight, plan.weight_box_rows(silu_mul=problem.gated)),
        x_scales=operands.x.scales,
        weight_scales=operands.weight.scales,
        bias=operands.bias,
        out=operands.out,
        num_rows=num_rows,
        out_features=problem.weight_rows,
        in_features=problem.in_features,
        out_stride=operands.out_stride,
        splits=plan.splits,
        tiles_m_in_l2=ROWS_IN_L2 // (plan.tile.m * plan.sharing),
        stages=plan.stages(problem.out_itemsize, device.max_shared_bytes),
        accumulate=problem.accumulates,
        silu_mul=problem.gated,
    )
    device.launch(*kernel, config, params)


def kernels_of(dtype: str, *, groups: bool) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    kernels: dict[Instantiation, None] = {}
    for out in (dtype, "float"):
        for plan in plans_for(groups=groups, logits=out == "float"):
            for used in (plan, replace(plan, sharing=SHARING)) if may_share(plan) else (plan,):
                kernels[SM90_FP8_MATMUL, template_of(used, dtype, out, groups=groups)] = None
    return list(kernels)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [kernel for dtype in halves for groups in (False, True) for kernel in kernels_of(dtype, groups=groups)]


FP8_LINEAR.register(Candidate("sm90", SPECS, _accepts, _launch, order=1))
