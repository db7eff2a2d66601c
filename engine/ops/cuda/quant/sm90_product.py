"""The product of many rows by a weight in quantised blocks on sm_90a: which kernel runs, and plans of
`sm90_block_matmul_kernel`.

A weight's elements are those of the dequantising kernel; in `sm90_block_matmul_kernel` their sums run along k as in
`sm90_matmul_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InT, Int32, InUint, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import box_map
from tessera.engine.formats import KERNEL_FORMATS, PackedFormat
from tessera.engine.ops.cuda.linear.sm90 import (
    BARRIER_BYTES,
    MAX_CLUSTER,
    MULTIPLE,
    ROWS_IN_L2,
    Plan,
    Tile,
    count_clusters_at_once,
)
from tessera.engine.ops.cuda.linear.sm90_kernels import MAX_STAGES
from tessera.engine.ops.cuda.quant import sm90_fragments
from tessera.engine.ops.cuda.quant.operands import Sm90Operands
from tessera.engine.ops.cuda.quant.sm90_fragments import SM90_BLOCK_FRAGMENTS, FragmentsPlan
from tessera.engine.ops.cuda.types import HALF_BYTES, WARPGROUP_SIZE, ceil_div, cuda_type


class Sm90BlockMatmulParams(NamedTuple):
    x_map: TensorMap
    x_tail_map: TensorMap
    codes: InUint
    headers: InUint
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    splits: Int32
    tiles_m_in_l2: Int32
    stages: Int32
    slots_offset: Int32
    accumulate: Int32
    silu_mul: Int32


SM90_BLOCK_MATMUL = KernelSpec(
    file="quant/sm90_block_matmul.cu",
    name="sm90_block_matmul_kernel",
    template=("T", "Out", "F", "WARPGROUPS_M", "WARPGROUP_N"),
    params=Sm90BlockMatmulParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_BLOCK_MATMUL, *sm90_fragments.SPECS)

TEAM_WARPGROUPS = Constant(2, "that dequantise together")
AHEAD = Constant(3, "steps of a team whose codes are on their way")
declare_header(
    "sm90_block_matmul",
    __name__,
    {"TEAM_WARPGROUPS": TEAM_WARPGROUPS, "AHEAD": AHEAD},
    (Sm90BlockMatmulParams,),
)

TEAM = TEAM_WARPGROUPS * WARPGROUP_SIZE
STEP = 128  # elements along k that are dequantised at a time
MIN_STAGES = 4
TILES = (Tile(1, 64), Tile(2, 64), Tile(2, 128))
ELEMENTS_PER_US = {1: 17_000, 2: 28_000}  # that a multiprocessor dequantises, by its teams
X_BYTES_PER_US = 42_000  # that a multiprocessor gets from L2
JOIN_US = 2.0  # of the sums of a cluster's blocks
TILE_US = 1.0  # from one tile to the next
KERNELS: tuple[KernelSpec[Any], ...] = (SM90_BLOCK_FRAGMENTS, SM90_BLOCK_MATMUL)  # the first that can does a product


@dataclass(frozen=True)
class BlockPlan:
    """How a product is divided: a tile, and slices of in_features that the blocks of a cluster take."""

    plan: Plan

    @property
    def teams(self) -> int:
        """That dequantise, as in the kernel."""
        return 2 if self.plan.tile.warpgroup_n <= 64 else 1

    @property
    def threads(self) -> int:
        return 2 * WARPGROUP_SIZE + self.teams * TEAM

    def template(self, dtype: str, out_dtype: str, format: PackedFormat) -> tuple[str, ...]:
        tile = self.plan.tile
        return (dtype, out_dtype, format.kernel_type, str(tile.warpgroups_m), str(tile.warpgroup_n))

    def slots_bytes(self, format: PackedFormat) -> int:
        """Of codes and headers on their way."""
        return self.teams * AHEAD * self.plan.tile.n * 4 * (format.lane_words + 1) * 4

    def stages(self, format: PackedFormat, out_itemsize: int, max_shared_bytes: int) -> int:
        """Of the ring: as many as fit."""
        taken = BARRIER_BYTES + self.plan.bytes_beside_ring(out_itemsize) + self.slots_bytes(format)
        return min(MAX_STAGES, (max_shared_bytes - taken) // self.plan.stage_bytes)

    def cost(self, num_rows: int, out_features: int, in_features: int, at_once: int) -> float:
        """Microseconds beyond what every plan takes, where `at_once` clusters run at a time."""
        rounds = ceil_div(self.plan.count(num_rows, out_features), at_once)
        steps = ceil_div(ceil_div(in_features, STEP), self.plan.splits)
        tile = self.plan.tile
        step = max(tile.n / ELEMENTS_PER_US[self.teams], tile.m * HALF_BYTES / X_BYTES_PER_US) * STEP
        return rounds * (steps * step + TILE_US) + (JOIN_US if self.plan.splits > 1 else 0.0)


def choose_plan(
    num_rows: int,
    out_features: int,
    in_features: int,
    clusters_at_once: tuple[int, ...],
    format: PackedFormat,
    *,
    out_itemsize: int,
    max_shared_bytes: int,
) -> BlockPlan | None:
    """The plan of least cost; `clusters_at_once[s - 1]` clusters of s blocks run at a time."""
    steps = ceil_div(in_features, STEP)
    plans = [
        BlockPlan(Plan(tile, splits))
        for tile in TILES
        if num_rows > tile.m - 64 and (num_rows > 64 or tile.warpgroups_m == 1)
        for splits in range(1, 1 + (min(MAX_CLUSTER, tile.warpgroup_n // 16) if out_itemsize == HALF_BYTES else 1))
        if splits <= steps and clusters_at_once[splits - 1]
    ]
    fitting = [plan for plan in plans if plan.stages(format, out_itemsize, max_shared_bytes) >= MIN_STAGES]

    def cost(plan: BlockPlan) -> float:
        return plan.cost(num_rows, out_features, in_features, clusters_at_once[plan.plan.splits - 1])

    return min(fitting, key=cost, default=None)


def plan_of(
    device: CudaDevice, operands: Sm90Operands, *, gated: bool, accumulates: bool
) -> BlockPlan | FragmentsPlan | None:
    """The plan of a part's product, by the first of KERNELS that can; None where none can."""
    x, part, bias, out, _, out_itemsize, out_stride = operands[:7]
    if not SM90_BLOCK_MATMUL.supports(device.arch) or not isinstance(part.format, PackedFormat):
        return None
    in_features = x.shape[1]
    features = part.shape[0]
    if in_features % MULTIPLE or (features // 2 if gated else features) % MULTIPLE:
        return None
    if out_itemsize != HALF_BYTES and (accumulates or bias is not None or gated):
        return None
    if x.pointer % 16 or out % 16 or out_stride % MULTIPLE or (bias is not None and bias.pointer % 4):
        return None
    for kernel in KERNELS:
        if kernel is SM90_BLOCK_FRAGMENTS:
            fragments_plan = sm90_fragments.plan_of(device, operands, gated=gated)
            if fragments_plan is not None:
                return fragments_plan
        if kernel is SM90_BLOCK_MATMUL and (plan := _ring_plan(device, operands)) is not None:
            return plan
    return None


def _ring_plan(device: CudaDevice, operands: Sm90Operands) -> BlockPlan | None:
    x, part, out_itemsize = operands.x, operands.part, operands.out_itemsize
    assert isinstance(part.format, PackedFormat)
    num_rows, in_features = x.shape
    clusters = count_clusters_at_once(device, cuda_type(x.dtype))
    limit = device.max_shared_bytes
    sizes = (num_rows, part.shape[0], in_features)
    return choose_plan(*sizes, clusters, part.format, out_itemsize=out_itemsize, max_shared_bytes=limit)


def launch(
    device: CudaDevice, operands: Sm90Operands, chosen: BlockPlan | FragmentsPlan, *, gated: bool, accumulates: bool
) -> None:
    """Submit the product divided by a plan."""
    if isinstance(chosen, FragmentsPlan):
        sm90_fragments.launch(device, operands, chosen, gated=gated, accumulates=accumulates)
        return
    x, part, out_itemsize = operands.x, operands.part, operands.out_itemsize
    assert isinstance(part.format, PackedFormat)
    num_rows = x.shape[0]
    clusters = count_clusters_at_once(device, cuda_type(x.dtype))
    plan = chosen.plan
    stages = chosen.stages(part.format, out_itemsize, device.max_shared_bytes)
    count = plan.count(num_rows, part.shape[0])
    groups = count if plan.splits > 1 else min(count, clusters[plan.splits - 1])
    slots_offset = stages * plan.stage_bytes + plan.bytes_beside_ring(out_itemsize)
    shared_bytes = slots_offset + chosen.slots_bytes(part.format)
    config = LaunchConfig((groups * plan.splits, 1, 1), (chosen.threads, 1, 1), shared_bytes, plan.splits)
    params = Sm90BlockMatmulParams(
        **operands.params(gated=gated, accumulates=accumulates),
        x_map=box_map(x, plan.tile.m),
        x_tail_map=box_map(x, num_rows % plan.tile.m or plan.tile.m),
        splits=plan.splits,
        tiles_m_in_l2=ROWS_IN_L2 // plan.tile.m,
        stages=stages,
        slots_offset=slots_offset,
    )
    template = chosen.template(cuda_type(x.dtype), operands.out_dtype, part.format)
    device.launch(SM90_BLOCK_MATMUL, template, config, params)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    formats = KERNEL_FORMATS.values()
    return [kernel for dtype in halves for format in formats for kernel in sorted(kernels_of(format, dtype), key=str)]


def kernels_of(format: PackedFormat, dtype: str) -> set[Instantiation]:
    """All that products by a weight of this format launch for elements of this C type."""
    in_ring: set[Instantiation] = {
        (SM90_BLOCK_MATMUL, BlockPlan(Plan(tile)).template(dtype, out, format))
        for tile in TILES
        for out in (dtype, "float")
    }
    return in_ring | sm90_fragments.kernels_of(format, dtype)
