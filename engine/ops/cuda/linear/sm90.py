"""The product of many rows with TMA and wgmma of sm_90a.

A row's result may differ in its last bits with the number of slices of in_features that a plan sums
separately; it does not depend on the other rows otherwise. Products in order are not sliced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.tensor_map import box_map
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.linear.costs import DEFAULT, Sm90Costs, costs_of
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.linear.sm90_kernels import (
    CHUNK_COLUMNS,
    CHUNK_PADDING,
    CONSUMER_WARPGROUPS,
    MAX_STAGES,
    SM90_MATMUL,
    SM90_MATMUL_WIDE,
    SPLITTABLE_N,
    TILE_K,
    WARP_ROWS,
    WGMMA_M,
    WIDE_CHUNK_COLUMNS,
    WIDE_SHARING,
    WIDE_TILE_N,
    WIDE_WARPGROUPS_M,
    Sm90MatmulParams,
    Sm90MatmulWideParams,
)
from tessera.engine.ops.cuda.types import HALF_BYTES, WARP_SIZE, WARPGROUP_SIZE, ceil_div
from tessera.engine.tensor import Tensor, float32

SPECS = (SM90_MATMUL, SM90_MATMUL_WIDE)

WARPGROUP_WARPS = WARPGROUP_SIZE // WARP_SIZE
CONSUMER_WARPS = CONSUMER_WARPGROUPS * WARPGROUP_WARPS
BLOCK_WARPS = CONSUMER_WARPS + WARPGROUP_WARPS
BLOCK_THREADS = BLOCK_WARPS * WARP_SIZE
SLOT_BYTES = CONSUMER_WARPS * WARP_SIZE * 4 * float32.itemsize
BARRIER_BYTES = 1024  # static shared memory, up to where the ring begins

MULTIPLE = 8  # of in_features and of the result's columns: rows of 16 bytes
ROWS_IN_L2 = 2048  # that share each tile of the weight while it is in L2
MAX_CLUSTER = 8
MIN_SPLIT_STEPS = 2  # along k in a slice


@dataclass(frozen=True)
class Tile:
    """What a block computes at a time.

    Attributes:
        warpgroups_m: warp groups along the rows, 64 rows each. Of two groups the others lie along the columns; three
            are a wide tile, which has a kernel of its own.
        warpgroup_n: columns of a warp group.
    """

    warpgroups_m: int
    warpgroup_n: int

    @property
    def m(self) -> int:
        return WGMMA_M * self.warpgroups_m

    @property
    def n(self) -> int:
        return self.warpgroup_n * (2 if self.warpgroups_m == 1 else 1)

    @property
    def wide(self) -> bool:
        return self.warpgroups_m == WIDE_WARPGROUPS_M

    def count(self, num_rows: int, out_features: int) -> int:
        """Tiles that cover the product."""
        return ceil_div(num_rows, self.m) * ceil_div(out_features, self.n)


TILES = (
    Tile(2, 256),
    Tile(2, 224),
    Tile(2, 192),
    Tile(2, 128),
    Tile(2, 96),
    Tile(2, 64),
    Tile(1, 64),
    Tile(1, 32),
)
WIDE = Tile(WIDE_WARPGROUPS_M, WIDE_TILE_N)
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
    def spec(self) -> KernelSpec[Any]:
        return SM90_MATMUL_WIDE if self.tile.wide else SM90_MATMUL

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        if self.tile.wide:
            return (dtype,)
        return (dtype, out_dtype, str(self.tile.warpgroups_m), str(self.tile.warpgroup_n), str(self.sharing))

    def count(self, num_rows: int, out_features: int) -> int:
        """Tiles, or groups of as many as are shared, that cover the product."""
        return self.tile.count(ceil_div(num_rows, self.sharing), out_features)

    def cost(self, num_rows: int, out_features: int, in_features: int, at_once: int, costs: Sm90Costs) -> float:
        """Microseconds beyond what every plan takes, where `at_once` clusters run at a time."""
        area = self.tile.m * self.tile.n
        rounds = ceil_div(self.count(num_rows, out_features), at_once)
        steps = ceil_div(ceil_div(in_features, TILE_K), self.splits)
        products = rounds * steps * costs.step_us[self.tile.warpgroups_m, self.tile.warpgroup_n]
        weight = HALF_BYTES * out_features * in_features / costs.weight_bytes_per_us
        storing = costs.store_us * rounds * area / (128 * 256)
        joining = rounds * (costs.join_us + costs.join_area_us * area / (128 * 64)) if self.splits > 1 else 0.0
        return max(products, weight) + costs.overlap * min(products, weight) + storing + joining

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
        """Rows of the weight that a copy brings: columns of a warp group, half of them or a block's share."""
        return self.tile.warpgroup_n // max(self.sharing, 2 if silu_mul else 1)

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
WIDE_PLAN = Plan(WIDE, sharing=WIDE_SHARING)
LOGITS_SHARING_PLANS = (Plan(LOGITS_TILES[0], sharing=2),)


def choose_plan(
    num_rows: int,
    out_features: int,
    in_features: int,
    clusters_at_once: tuple[int, ...],
    *,
    logits: bool = False,
    in_order: bool = False,
    costs: Sm90Costs = DEFAULT.sm90,
) -> Plan:
    """The narrow plan of least cost; `clusters_at_once[s - 1]` clusters of s blocks run at a time.

    `in_order` allows no slices.

    From `costs.min_sharing_rows` rows on blocks share what they read if they can; the cost knows of their pairs, not of
    what that brings.
    """
    steps = ceil_div(in_features, TILE_K)

    def runs(plan: Plan) -> bool:
        if num_rows <= plan.tile.m - WGMMA_M:  # a warp group's rows would be none
            return False
        if in_order and plan.splits > 1:
            return False
        return plan.splits == 1 or (plan.splits * MIN_SPLIT_STEPS <= steps and clusters_at_once[plan.splits - 1] > 0)

    def cost(plan: Plan) -> float:
        return plan.cost(num_rows, out_features, in_features, clusters_at_once[plan.cluster - 1], costs)

    plans, sharing_plans = (LOGITS_PLANS, LOGITS_SHARING_PLANS) if logits else (PLANS, SHARING_PLANS)
    if num_rows >= costs.min_sharing_rows and clusters_at_once[1]:
        apart = tuple(plan for plan in plans if replace(plan, sharing=2) not in sharing_plans)
        plans = (*apart, *sharing_plans)
    return min(filter(runs, plans), key=cost)


@lru_cache(maxsize=16)
def count_clusters_at_once(device: CudaDevice, dtype: str) -> tuple[int, ...]:
    """Clusters of 1, 2, ... MAX_CLUSTER blocks that `device` runs at a time, each block alone on its multiprocessor."""
    return clusters_at_once_of(device, SM90_MATMUL, Plan(TILES[-1]).template(dtype, dtype))


def clusters_at_once_of(device: CudaDevice, spec: KernelSpec[Any], template: tuple[str, ...]) -> tuple[int, ...]:
    """The same of a kernel whose blocks are as these products' are."""
    shared_bytes = device.max_shared_bytes - BARRIER_BYTES
    configs = [LaunchConfig((s, 1, 1), (BLOCK_THREADS, 1, 1), shared_bytes, s) for s in range(2, MAX_CLUSTER + 1)]
    return (device.multiprocessors, *(device.clusters_at_once(spec, template, config) for config in configs))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    plans = [plan for plan in (*PLANS, *SHARING_PLANS, WIDE_PLAN) if plan.splits == 1]
    pairs = [(plan.spec, plan.template(dtype, dtype)) for dtype in halves for plan in plans]
    logits_plans = (*LOGITS_PLANS, *LOGITS_SHARING_PLANS)
    return pairs + [(SM90_MATMUL, plan.template(dtype, "float")) for dtype in halves for plan in logits_plans]


def min_rows(features: int, multiprocessors: int, costs: Sm90Costs, *, silu_mul: bool, logits: bool) -> int:
    """From how many rows on these kernels beat the portable ones for a result of `features` columns."""
    first, last = costs.ahead_features
    ahead = silu_mul or logits or first * multiprocessors <= features <= last * multiprocessors
    return costs.min_rows_where_ahead if ahead else costs.min_rows


def can_do(problem: LinearProblem, device: CudaDevice) -> bool:
    """Whether these kernels can do the product, whatever its rows, after a norm by another kernel."""
    logits = problem.logits
    if not problem.is_half or not SM90_MATMUL.supports(device.arch):
        return False
    if logits and (problem.accumulates or problem.biased):
        return False
    if problem.in_features % MULTIPLE or problem.features % MULTIPLE:
        return False
    return problem.inputs_aligned and problem.out_aligned and problem.bias_in_pairs


def least_rows(problem: LinearProblem, device: CudaDevice) -> int:
    """From which number of rows on these kernels are ahead of those for few rows."""
    sizes = (problem.features, device.multiprocessors, costs_of(device).sm90)
    return min_rows(*sizes, silu_mul=problem.gated, logits=problem.logits)


def _is_for(problem: LinearProblem, device: CudaDevice) -> bool:
    """Whether these kernels can do the product and are not slower than the portable ones.

    In order, portable ones would do a gated product in two steps that round twice, so these take all that they can do,
    but of gates with GELU none: few rows are in two steps there.
    """
    if problem.normed or (problem.gelu and problem.in_order) or not can_do(problem, device):
        return False
    return problem.in_order or problem.num_rows >= least_rows(problem, device)


def _accepts(problem: LinearProblem, device: CudaDevice) -> Plan | None:
    if not _is_for(problem, device):
        return None
    clusters = count_clusters_at_once(device, problem.dtype)
    sizes = (problem.num_rows, problem.weight_rows, problem.in_features)
    return choose_plan(*sizes, clusters, logits=problem.logits, in_order=problem.in_order, costs=costs_of(device).sm90)


def _accepts_wide(problem: LinearProblem, device: CudaDevice) -> Plan | None:
    least = costs_of(device).sm90.min_wide_rows
    if problem.num_rows < least or problem.logits or not _is_for(problem, device):
        return None
    return WIDE_PLAN if count_clusters_at_once(device, problem.dtype)[1] else None


def _cost(problem: LinearProblem, plan: Plan, device: CudaDevice) -> float:
    at_once = count_clusters_at_once(device, problem.dtype)[plan.cluster - 1]
    sizes = (problem.num_rows, problem.weight_rows, problem.in_features)
    return plan.cost(*sizes, at_once, costs_of(device).sm90)


def config_of(device: CudaDevice, problem: LinearProblem, plan: Plan) -> LaunchConfig:
    at_once = count_clusters_at_once(device, problem.dtype)[plan.cluster - 1]
    sizes = (problem.num_rows, problem.weight_rows, problem.out_itemsize)
    return plan.config(*sizes, at_once, device.max_shared_bytes)


def tail_map(x: Tensor, plan: Plan) -> bytes:
    """Of the last tile's rows."""
    return box_map(x, x.shape[0] % plan.tile.m or plan.tile.m)


def _launch(device: CudaDevice, problem: LinearProblem, plan: Plan, operands: LinearOperands) -> None:
    """Submit the product divided by `plan`."""
    num_rows, x = problem.num_rows, operands.x
    template = plan.template(problem.dtype, problem.out_dtype)
    config = config_of(device, problem, plan)
    x_map = box_map(x, plan.tile.m)
    weight_map = box_map(operands.weight, plan.weight_box_rows(silu_mul=problem.gated))
    tiles_m_in_l2 = ROWS_IN_L2 // (plan.tile.m * plan.sharing)
    stages = plan.stages(problem.out_itemsize, device.max_shared_bytes)
    if plan.tile.wide:
        wide_params = Sm90MatmulWideParams(
            x_map=x_map,
            weight_map=weight_map,
            bias=operands.bias,
            out=operands.out,
            num_rows=num_rows,
            out_features=problem.weight_rows,
            in_features=problem.in_features,
            tiles_m_in_l2=tiles_m_in_l2,
            stages=stages,
            accumulate=problem.accumulates,
            gated=problem.gate,
        )
        device.launch(SM90_MATMUL_WIDE, template, config, wide_params)
    else:
        params = Sm90MatmulParams(
            x_map=x_map,
            x_tail_map=tail_map(x, plan),
            weight_map=weight_map,
            bias=operands.bias,
            out=operands.out,
            num_rows=num_rows,
            out_features=problem.weight_rows,
            in_features=problem.in_features,
            splits=plan.splits,
            tiles_m_in_l2=tiles_m_in_l2,
            stages=stages,
            accumulate=problem.accumulates,
            gated=problem.gate,
        )
        device.launch(SM90_MATMUL, template, config, params)


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
    gelu_mul: bool = False,
) -> None:
    """Submit the product divided by a plan of the caller's."""
    operands = LinearOperands(x, weight, bias, out)
    gated = silu_mul or gelu_mul
    _launch(device, LinearProblem.of(operands, gated=gated, accumulates=accumulate, gelu=gelu_mul), plan, operands)


LINEAR.register(Candidate("sm90", (SM90_MATMUL,), _accepts, _launch, order=1, cost=_cost))
LINEAR.register(Candidate("sm90_wide", (SM90_MATMUL_WIDE,), _accepts_wide, _launch, order=1, cost=_cost))
