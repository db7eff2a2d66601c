"""Matrix products of many rows on sm_90a's own copy engine and tensor-core instructions.

A row's result may differ in its last bits with the number of slices of in_features that a plan sums
separately; it does not depend on the other rows otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.tensor_map import ALIGNMENT, box_map
from tessera.engine.ops.cuda.types import WARP_SIZE, aligned, ceil_div, cuda_type
from tessera.engine.tensor import Tensor, float32

MATMUL_HOPPER = KernelSpec(
    file="linear/sm90_matmul.cu",
    name="matmul_hopper_kernel",
    template=("T", "Out", "WARPGROUPS_M", "WARPGROUP_N", "SHARING"),
    parameters=(
        ("x_map", "tensor_map"),
        ("x_tail_map", "tensor_map"),
        ("weight_map", "tensor_map"),
        ("bias", "pointer"),
        ("out", "pointer"),
        ("num_rows", "int32"),
        ("out_features", "int32"),
        ("in_features", "int32"),
        ("splits", "int32"),
        ("tiles_m_in_l2", "int32"),
        ("stages", "int32"),
        ("accumulate", "int32"),
        ("silu_mul", "int32"),
    ),
    min_arch=90,
    arch_specific=True,
    overlaps=True,
)
MATMUL_HOPPER_WIDE = replace(
    MATMUL_HOPPER,
    file="linear/sm90_matmul_wide.cu",
    name="matmul_hopper_wide_kernel",
    template=("T",),
    parameters=tuple(p for p in MATMUL_HOPPER.parameters if p[0] not in ("x_tail_map", "splits")),
)
SPECS = (MATMUL_HOPPER, MATMUL_HOPPER_WIDE)

# As in cuda_src/linear/sm90_matmul.cu, linear/sm90_matmul_wide.cu and include/hopper_product.cuh.
WGMMA_M = 64
TILE_K = 64
MAX_STAGES = 12
CONSUMER_WARPS = 8
WARP_ROWS = 16
CHUNK_COLUMNS = 64  # of results on their way out
WIDE_CHUNK_COLUMNS = 32
CHUNK_PADDING = 8
SPLITTABLE_N = 128  # the widest warp group whose k may be split

BLOCK_WARPS = CONSUMER_WARPS + 4
BLOCK_THREADS = BLOCK_WARPS * WARP_SIZE
HALF_BYTES = 2
SLOT_BYTES = CONSUMER_WARPS * WARP_SIZE * 16
BARRIER_BYTES = 1024  # static shared memory, up to where the ring begins

MIN_ROWS = 33  # from which on this kernel is as fast as the portable ones or faster;
MIN_ROWS_WHERE_AHEAD = 17  # for products of which `min_rows` knows
MULTIPLE = 8  # of in_features and of the result's columns: rows of 16 bytes
ROWS_IN_L2 = 2048  # that share each tile of the weight while it is in L2
MAX_CLUSTER = 8
MIN_SPLIT_STEPS = 2  # along k in a slice
MIN_SHARING_ROWS = 1024  # from which on pairs of blocks share weight tiles
MIN_WIDE_ROWS = 1280  # from which on tiles of three warp groups may be chosen


@dataclass(frozen=True)
class Tile:
    """What a block computes at a time.

    Attributes:
        warpgroups_m: warp groups along the rows, 64 rows each. Of two groups the others lie along the columns; three
            are a wide tile, which has a kernel of its own.
        warpgroup_n: columns of a warp group.
        step_us: microseconds for 64 elements along k where all multiprocessors are at it (H200).
    """

    warpgroups_m: int
    warpgroup_n: int
    step_us: float

    @property
    def m(self) -> int:
        return WGMMA_M * self.warpgroups_m

    @property
    def n(self) -> int:
        return self.warpgroup_n * (2 if self.warpgroups_m == 1 else 1)

    @property
    def wide(self) -> bool:
        return self.warpgroups_m == 3

    def count(self, num_rows: int, out_features: int) -> int:
        """Tiles that cover the product."""
        return ceil_div(num_rows, self.m) * ceil_div(out_features, self.n)


TILES = (
    Tile(2, 256, step_us=0.63),
    Tile(2, 224, step_us=0.57),
    Tile(2, 192, step_us=0.49),
    Tile(2, 128, step_us=0.35),
    Tile(2, 96, step_us=0.30),
    Tile(2, 64, step_us=0.22),
    Tile(1, 64, step_us=0.25),
    Tile(1, 32, step_us=0.24),
)
WIDE = Tile(3, 256, step_us=0.88)  # 7 % less than one and a half of the first's
LOGITS_TILES = (TILES[0], TILES[3], TILES[6])  # for float32 results


@dataclass(frozen=True)
class Plan:
    """How a product is divided, and what the blocks of a cluster have in common; at most one of the two.

    Attributes:
        splits: slices of in_features, one for each block of the cluster: they have one tile.
        sharing: blocks of the cluster that take neighbouring rows of tiles and read each tile of the weight once.
    """

    tile: Tile
    splits: int = 1
    sharing: int = 1

    @property
    def cluster(self) -> int:
        """Its blocks."""
        return self.splits * self.sharing

    @property
    def spec(self) -> KernelSpec:
        return MATMUL_HOPPER_WIDE if self.tile.wide else MATMUL_HOPPER

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        if self.tile.wide:
            return (dtype,)
        return (dtype, out_dtype, str(self.tile.warpgroups_m), str(self.tile.warpgroup_n), str(self.sharing))

    def count(self, num_rows: int, out_features: int) -> int:
        """Tiles, or groups of as many as are shared, that cover the product."""
        return self.tile.count(ceil_div(num_rows, self.sharing), out_features)

    def cost(self, num_rows: int, out_features: int, in_features: int, at_once: int) -> float:
        """Microseconds on an H200 beyond what every plan takes, where `at_once` clusters run at a time.

        Fitted to measurements of all plans on the shapes of Llama 8B and Qwen3 0.6B with 64 to 8192 rows. What it
        chooses is within 1 % of the best on average and 5 % at worst, also of 256 to 2048 rows without rests, where
        power bounds the clock.
        """
        area = self.tile.m * self.tile.n
        rounds = ceil_div(self.count(num_rows, out_features), at_once)
        steps = ceil_div(ceil_div(in_features, TILE_K), self.splits)
        products = rounds * steps * self.tile.step_us
        weight = 2 * out_features * in_features / 3.4e6
        storing = 1.84 * rounds * area / (128 * 256)
        joining = rounds * (1.1 + 1.2 * area / (128 * 64)) if self.splits > 1 else 0.0
        return max(products, weight) + 0.15 * min(products, weight) + storing + joining

    @property
    def stage_bytes(self) -> int:
        return (self.tile.m + self.tile.n) * TILE_K * HALF_BYTES

    @property
    def share_bytes(self) -> int:
        """Of the sums that a block sends to another of its cluster."""
        return 2 * ceil_div(self.tile.warpgroup_n // 16, self.splits) * SLOT_BYTES

    def bytes_beside_ring(self, out_itemsize: int) -> int:
        """Of results on their way out and of the sums from other blocks."""
        warps, columns = (BLOCK_WARPS, WIDE_CHUNK_COLUMNS) if self.tile.wide else (CONSUMER_WARPS, CHUNK_COLUMNS)
        staging = warps * WARP_ROWS * (columns + CHUNK_PADDING) * HALF_BYTES if out_itemsize == HALF_BYTES else 0
        return staging + (self.splits - 1) * self.share_bytes

    def weight_box_rows(self, *, silu_mul: bool) -> int:
        """Rows of the weight that a copy brings: columns of a warp group, or half of them."""
        return self.tile.warpgroup_n // (2 if silu_mul or self.sharing > 1 else 1)

    def stages(self, out_itemsize: int, max_shared_bytes: int) -> int:
        """Of the ring: as many as fit."""
        room = max_shared_bytes - BARRIER_BYTES - self.bytes_beside_ring(out_itemsize)
        return min(MAX_STAGES, room // self.stage_bytes)

    def config(
        self, num_rows: int, out_features: int, out_itemsize: int, at_once: int, max_shared_bytes: int
    ) -> LaunchConfig:
        """Of a launch where `at_once` clusters run at a time."""
        count = self.count(num_rows, out_features)
        clusters = count if self.splits > 1 else min(count, at_once)
        ring_bytes = self.stages(out_itemsize, max_shared_bytes) * self.stage_bytes
        shared_bytes = ring_bytes + self.bytes_beside_ring(out_itemsize)
        return LaunchConfig((clusters * self.cluster, 1, 1), (BLOCK_THREADS, 1, 1), shared_bytes, self.cluster)


PLANS = tuple(
    Plan(tile, splits)
    for tile in TILES
    for splits in range(1, 1 + (min(MAX_CLUSTER, tile.warpgroup_n // 16) if tile.warpgroup_n <= SPLITTABLE_N else 1))
)
LOGITS_PLANS = tuple(Plan(tile) for tile in LOGITS_TILES)
SHARING_PLANS = tuple(Plan(tile, sharing=2) for tile in TILES if tile.warpgroups_m == 2 and tile.warpgroup_n >= 128)
WIDE_PLAN = Plan(WIDE, sharing=2)
LOGITS_SHARING_PLANS = (Plan(LOGITS_TILES[0], sharing=2),)


@lru_cache(maxsize=16384)
def choose_plan(
    num_rows: int, out_features: int, in_features: int, clusters_at_once: tuple[int, ...], *, logits: bool = False
) -> Plan:
    """The plan of least cost; `clusters_at_once[s - 1]` clusters of s blocks run at a time.

    From MIN_SHARING_ROWS rows on blocks share what they read if they can; the cost knows of their pairs, not of what
    that brings.
    """
    steps = ceil_div(in_features, TILE_K)

    def runs(plan: Plan) -> bool:
        if num_rows <= plan.tile.m - WGMMA_M:  # a warp group's rows would be none
            return False
        return plan.splits == 1 or (plan.splits * MIN_SPLIT_STEPS <= steps and clusters_at_once[plan.splits - 1] > 0)

    def cost(plan: Plan) -> float:
        return plan.cost(num_rows, out_features, in_features, clusters_at_once[plan.cluster - 1])

    plans, sharing_plans = (LOGITS_PLANS, LOGITS_SHARING_PLANS) if logits else (PLANS, SHARING_PLANS)
    if num_rows >= MIN_SHARING_ROWS and clusters_at_once[1]:
        wide = (WIDE_PLAN,) if num_rows >= MIN_WIDE_ROWS and not logits else ()
        apart = tuple(plan for plan in plans if replace(plan, sharing=2) not in sharing_plans)
        plans = (*apart, *sharing_plans, *wide)
    return min(filter(runs, plans), key=cost)


@lru_cache(maxsize=16)
def count_clusters_at_once(device: CudaDevice, dtype: str) -> tuple[int, ...]:
    """Clusters of 1, 2, ... MAX_CLUSTER blocks that `device` runs at a time, each block alone on its multiprocessor."""
    template = Plan(TILES[-1]).template(dtype, dtype)
    shared_bytes = device.max_shared_bytes - BARRIER_BYTES
    configs = [LaunchConfig((s, 1, 1), (BLOCK_THREADS, 1, 1), shared_bytes, s) for s in range(2, MAX_CLUSTER + 1)]
    counts = [device.clusters_at_once(MATMUL_HOPPER, template, config) for config in configs]
    return (device.multiprocessors, *counts)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    plans = [plan for plan in (*PLANS, *SHARING_PLANS, WIDE_PLAN) if plan.splits == 1]
    pairs = [(plan.spec, plan.template(dtype, dtype)) for dtype in halves for plan in plans]
    logits_plans = (*LOGITS_PLANS, *LOGITS_SHARING_PLANS)
    return pairs + [(MATMUL_HOPPER, plan.template(dtype, "float")) for dtype in halves for plan in logits_plans]


def min_rows(features: int, multiprocessors: int, *, silu_mul: bool, logits: bool) -> int:
    """From how many rows on this kernel beats the portable ones for a result of `features` columns.

    By measurement with 17 to 32 rows on an H200: gated products take 4 to 20 % less time, as the portable kernels leave
    the activation to one of its own, results of 3,072 or 4,096 features 6 to 29 % less, logits a little less; of 1,024
    to 2,560, 5,120 or 6,144 features up to 25 % more.
    """
    ahead = silu_mul or logits or 23 * multiprocessors <= features <= 32 * multiprocessors
    return MIN_ROWS_WHERE_AHEAD if ahead else MIN_ROWS


def launch_product(
    device: CudaDevice,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    accumulate: bool = False,
    silu_mul: bool = False,
) -> bool:
    """Submit the product; False, and nothing done, if this kernel is not for it.

    Shapes as for `Ops.matmul`; [M, N / 2] if `silu_mul`.
    """
    num_rows, in_features = x.shape
    logits = out.dtype != x.dtype
    if num_rows < min_rows(out.shape[1], device.multiprocessors, silu_mul=silu_mul, logits=logits):
        return False
    if x.dtype == float32 or not MATMUL_HOPPER.supports(device.arch):
        return False
    if logits and (accumulate or bias is not None):
        return False
    if in_features % MULTIPLE or out.shape[1] % MULTIPLE or not aligned(ALIGNMENT, x, weight, out):
        return False
    if not aligned(2 * HALF_BYTES, bias):
        return False
    dtype = cuda_type(x.dtype)
    out_features = weight.shape[0]
    clusters = count_clusters_at_once(device, dtype)
    plan = choose_plan(num_rows, out_features, in_features, clusters, logits=logits)
    launch(device, plan, x, weight, bias, out, accumulate=accumulate, silu_mul=silu_mul)
    return True


def launch(
    device: CudaDevice,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    accumulate: bool = False,
    silu_mul: bool = False,
) -> None:
    """Submit the product divided by `plan`, which `launch_product` otherwise chooses."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    dtype, itemsize = cuda_type(x.dtype), out.dtype.itemsize
    at_once = count_clusters_at_once(device, dtype)[plan.cluster - 1]
    splits = () if plan.tile.wide else (plan.splits,)
    tail = () if plan.tile.wide else (box_map(x, num_rows % plan.tile.m or plan.tile.m),)
    device.launch(
        plan.spec,
        plan.template(dtype, cuda_type(out.dtype)),
        plan.config(num_rows, out_features, itemsize, at_once, device.max_shared_bytes),
        box_map(x, plan.tile.m),
        *tail,
        box_map(weight, plan.weight_box_rows(silu_mul=silu_mul)),
        bias,
        out,
        num_rows,
        out_features,
        in_features,
        *splits,
        ROWS_IN_L2 // (plan.tile.m * plan.sharing),
        plan.stages(itemsize, device.max_shared_bytes),
        int(accumulate),
        int(silu_mul),
    )
