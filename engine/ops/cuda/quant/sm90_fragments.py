"""The product of many rows by a weight in quantised blocks on sm_90a, with the weight's rows as those of wgmma: plans
of `sm90_block_fragments_kernel`.

A weight's elements are those of the dequantising kernel; each lane takes them along k in an order of its own, so that
sums differ from those of `sm90_block_matmul_kernel` in their last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InT, Int32, InUint, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import box_map
from tessera.engine.formats import PackedFormat
from tessera.engine.ops.cuda.linear.sm90 import BARRIER_BYTES, MAX_CLUSTER, count_clusters_at_once
from tessera.engine.ops.cuda.linear.sm90_kernels import WGMMA_M
from tessera.engine.ops.cuda.quant.operands import Sm90Operands
from tessera.engine.ops.cuda.quant.slices import MAX_SLICES, nbytes_of
from tessera.engine.ops.cuda.quant.slices import launch as launch_add_slices
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, HALF_BYTES, WARPGROUP_SIZE, ceil_div, cuda_type
from tessera.engine.tensor import float32


class Sm90BlockFragmentsParams(NamedTuple):
    x_map: TensorMap
    codes: InUint
    headers: InUint
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    splits: Int32
    slices: Int32
    turned: Int32
    turns: Int32
    stages: Int32
    accumulate: Int32
    silu_mul: Int32


SM90_BLOCK_FRAGMENTS = KernelSpec(
    file="quant/sm90_block_fragments.cu",
    name="sm90_block_fragments_kernel",
    template=("T", "Out", "F", "WARPGROUPS", "TOKENS"),
    params=Sm90BlockFragmentsParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_BLOCK_FRAGMENTS,)

NARROW_AHEAD = Constant(3, "pairs of steps whose codes are on their way to two warp groups")
BROAD_AHEAD = Constant(2, "to four")
WIDE_AHEAD = Constant(1, "where a tile has more than 128 tokens, whose steps take longer")
MAX_STEPS = Constant(6, "of x in the ring")
CHUNK_TOKENS = Constant(32, "whose sums pass through shared memory at a time")
STAGING_PADDING = Constant(4, "floats: lanes' sums fall into different banks")
declare_header(
    "sm90_block_fragments",
    __name__,
    {
        "NARROW_AHEAD": NARROW_AHEAD,
        "BROAD_AHEAD": BROAD_AHEAD,
        "WIDE_AHEAD": WIDE_AHEAD,
        "MAX_STEPS": MAX_STEPS,
        "CHUNK_TOKENS": CHUNK_TOKENS,
        "STAGING_PADDING": STAGING_PADDING,
    },
    (Sm90BlockFragmentsParams,),
)

STEP, PAIR = 128, 256  # elements along k that are multiplied, and whose codes come, at a time
MIN_STAGES = 2
# Microseconds, fitted to products of Q4_K on one H200 (`tests.bench.block_kernels Q4_K --kernels`, 2026-11-29).
L2_BYTES_PER_US = 62_000  # that a multiprocessor gets from L2 where all read
PRODUCTS_PER_US = 3_150_000  # of a multiprocessor where all multiply
JOIN_US = 1.2  # of the sums of a cluster's blocks, for each but the first
ADD_US, SUMS_BYTES_PER_US = 0.9, 3_400_000  # of slices' sums: the kernel that adds them, what is written and read
TURN_US, TURNED_BYTES_PER_US = 1.5, 317_000  # of the kernel that turns x, which the product waits for
TILE_US = 0.7  # from one tile to the next
STORE_US = 0.014  # of a token's sums


@dataclass(frozen=True)
class FragmentsTile:
    """A thread block's tile: 64 rows of the weight for each warp group, by `tokens` rows of x."""

    warpgroups: int
    tokens: int

    @property
    def features(self) -> int:
        return WGMMA_M * self.warpgroups

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * WARPGROUP_SIZE

    @property
    def pairs_ahead(self) -> int:
        """Pairs of steps whose codes are on their way, as in the kernel."""
        if self.tokens > 128:
            return WIDE_AHEAD
        return NARROW_AHEAD if self.warpgroups == 2 else BROAD_AHEAD

    @property
    def stage_bytes(self) -> int:
        return self.tokens * STEP * HALF_BYTES

    def bytes_beside_ring(self, format: PackedFormat) -> int:
        """Of sums on their way out, and of codes and headers on their way in."""
        headers = WARPGROUP_SIZE // 4 * format.header_words * PAIR // format.span
        pair_bytes = 2 * 4 * (2 * WARPGROUP_SIZE * format.lane_words + headers)
        slots = self.warpgroups * self.pairs_ahead * pair_bytes
        return slots + CHUNK_TOKENS * (self.features + STAGING_PADDING) * float32.itemsize


# Variants, with the microseconds of a step whose operands are there: with x as blocks turn it, and as it comes turned.
STEP_US = {
    FragmentsTile(2, 32): (0.44, 0.38),
    FragmentsTile(4, 32): (0.78, 0.65),
    FragmentsTile(2, 64): (0.66, 0.46),
    FragmentsTile(4, 64): (1.21, 0.88),
    FragmentsTile(2, 128): (0.97, 0.55),
    FragmentsTile(2, 256): (1.93, 1.05),
}
TILES = tuple(STEP_US)


class FragmentsProblem(NamedTuple):
    """A product, as `choose_plan` sees it.

    `turn_us`: of the kernel that turns x, 0 where another has done it; None where x cannot be turned. `comes_turned`: x
    is always turned. Sums of up to `max_slices` slices of k have room.
    """

    num_rows: int
    out_features: int
    in_features: int
    turn_us: float | None
    comes_turned: bool
    max_slices: int


@dataclass(frozen=True)
class FragmentsPlan:
    """A tile, `splits` slices of in_features, one for each block of a cluster, or `slices` of them, whose sums another
    kernel adds up; whether x comes `turned`."""

    tile: FragmentsTile
    splits: int = 1
    slices: int = 1
    turned: bool = False

    @property
    def blocks(self) -> int:
        """Of a tile."""
        return self.splits * self.slices

    def template(self, dtype: str, out_dtype: str, format: PackedFormat) -> tuple[str, ...]:
        return (dtype, out_dtype, format.kernel_type, str(self.tile.warpgroups), str(self.tile.tokens))

    def stages(self, format: PackedFormat, max_shared_bytes: int) -> int:
        """Of the ring of x: as many as fit."""
        room = max_shared_bytes - BARRIER_BYTES - self.tile.bytes_beside_ring(format)
        return min(MAX_STEPS, room // self.tile.stage_bytes)

    def count(self, num_rows: int, out_features: int) -> int:
        """Tiles that cover the product."""
        return ceil_div(num_rows, self.tile.tokens) * ceil_div(out_features, self.tile.features)

    def cost(self, problem: FragmentsProblem, at_once: int, format: PackedFormat) -> float:
        """Microseconds beyond what every plan takes, where `at_once` clusters run at a time."""
        rounds = ceil_div(self.count(problem.num_rows, problem.out_features), max(at_once // self.slices, 1))
        steps = ceil_div(ceil_div(problem.in_features, PAIR), self.blocks) * (PAIR // STEP)
        storing = STORE_US * min(problem.num_rows, self.tile.tokens) + JOIN_US * (self.splits - 1)
        read = self.tile.stage_bytes + self.tile.features * STEP * format.lane_words / 8
        products = self.tile.features * self.tile.tokens * STEP
        step = max(STEP_US[self.tile][self.turned], read / L2_BYTES_PER_US, products / PRODUCTS_PER_US)
        us = rounds * (steps * step + TILE_US + storing)
        if self.turned:
            assert problem.turn_us is not None
            us += problem.turn_us
        if self.slices > 1:
            us += ADD_US + nbytes_of(self.slices, problem.num_rows, problem.out_features) / SUMS_BYTES_PER_US
        return us


@lru_cache(4096)
def choose_plan(
    problem: FragmentsProblem, clusters_at_once: tuple[int, ...], format: PackedFormat, max_shared_bytes: int
) -> FragmentsPlan | None:
    """The plan of least cost; `clusters_at_once[s - 1]` clusters of s blocks run at a time."""
    pairs = ceil_div(problem.in_features, PAIR)
    divisions = [(splits, 1) for splits in range(1, 1 + min(MAX_CLUSTER, pairs)) if clusters_at_once[splits - 1]]
    divisions += [(1, slices) for slices in range(2, 1 + min(MAX_SLICES, problem.max_slices, pairs))]
    orders = [] if problem.comes_turned else [False]
    if problem.turn_us is not None:
        orders.append(True)
    plans = [
        plan
        for tile in STEP_US
        for splits, slices in divisions
        for turned in orders
        if (plan := FragmentsPlan(tile, splits, slices, turned)).stages(format, max_shared_bytes) >= MIN_STAGES
    ]
    return min(plans, key=lambda plan: plan.cost(problem, clusters_at_once[plan.splits - 1], format), default=None)


def can_take_turned(device: CudaDevice, format: PackedFormat) -> bool:
    """Whether some variant multiplies turned rows by weights of this format."""
    return any(FragmentsPlan(tile).stages(format, device.max_shared_bytes) >= MIN_STAGES for tile in TILES)


def plan_of(device: CudaDevice, operands: Sm90Operands, *, gated: bool) -> FragmentsPlan | None:
    """The plan of a product that any kernel of sm_90a can do; None where no variant fits."""
    x, part = operands.x, operands.part
    assert isinstance(part.format, PackedFormat)
    num_rows, features = x.shape[0], part.shape[0]
    room = 0 if gated or operands.sums is None else operands.sums.nbytes
    turn_us = 0.0 if operands.comes_turned else TURN_US + x.nbytes / TURNED_BYTES_PER_US
    problem = FragmentsProblem(
        num_rows=num_rows,
        out_features=features,
        in_features=x.shape[1],
        turn_us=None if operands.turned is None else turn_us,
        comes_turned=operands.comes_turned,
        max_slices=room // nbytes_of(1, num_rows, features),
    )
    clusters = count_clusters_at_once(device, cuda_type(x.dtype))
    return choose_plan(problem, clusters, part.format, device.max_shared_bytes)


def launch(device: CudaDevice, operands: Sm90Operands, plan: FragmentsPlan, *, gated: bool, accumulates: bool) -> None:
    """Submit the product divided by a plan."""
    if plan.slices == 1:
        _launch_product(device, operands, plan, gated=gated, accumulates=accumulates)
        return
    assert operands.sums is not None
    assert not gated
    sums = operands.sums.pointer
    sliced = operands._replace(
        bias=None,
        out=sums,
        out_dtype=C_TYPE_NAMES[float32],
        out_itemsize=float32.itemsize,
        out_stride=operands.part.shape[0],
    )
    _launch_product(device, sliced, plan, gated=False, accumulates=False)
    dtype = cuda_type(operands.x.dtype)
    launch_add_slices(device, operands, plan.slices, sums, dtype, operands.out_dtype, accumulates=accumulates)


def _launch_product(
    device: CudaDevice, operands: Sm90Operands, plan: FragmentsPlan, *, gated: bool, accumulates: bool
) -> None:
    """The product, of which slices are stored behind each other."""
    x, part = operands.x, operands.part
    assert isinstance(part.format, PackedFormat)
    tile = plan.tile
    at_once = count_clusters_at_once(device, cuda_type(x.dtype))[plan.splits - 1] // plan.slices
    count = plan.count(x.shape[0], part.shape[0])
    groups = count if plan.splits > 1 else min(count, max(at_once, 1))
    stages = plan.stages(part.format, device.max_shared_bytes)
    shared_bytes = stages * tile.stage_bytes + tile.bytes_beside_ring(part.format)
    config = LaunchConfig((groups * plan.blocks, 1, 1), (tile.threads, 1, 1), shared_bytes, plan.splits)
    rows = operands.turned if plan.turned else x
    assert rows is not None
    params = Sm90BlockFragmentsParams(
        **operands.params(gated=gated, accumulates=accumulates),
        x_map=box_map(rows, tile.tokens),
        splits=plan.splits,
        slices=plan.slices,
        turned=plan.turned,
        turns=operands.turns,
        stages=stages,
    )
    template = plan.template(cuda_type(x.dtype), operands.out_dtype, part.format)
    device.launch(SM90_BLOCK_FRAGMENTS, template, config, params)


def kernels_of(format: PackedFormat, dtype: str) -> set[Instantiation]:
    """All that products by a weight of this format launch for elements of this C type."""
    return {
        (SM90_BLOCK_FRAGMENTS, FragmentsPlan(tile).template(dtype, out, format))
        for tile in TILES
        for out in (dtype, "float")
    }
