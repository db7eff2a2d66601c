"""The products of the backward on sm_90a, which read their operands as they lie.

Where there are too few tiles for the device, sums over many tokens are divided into slices that are added afterwards in
their order. Plans, and with them the order of a sum, depend on shapes and the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Int32, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import ALIGNMENT, box_map
from tessera.engine.ops.cuda.linear.costs import Sm90Costs, costs_of
from tessera.engine.ops.cuda.linear.sm90 import (
    BLOCK_THREADS,
    MULTIPLE,
    ROWS_IN_L2,
    WIDE_PLAN,
    Plan,
    Tile,
    count_clusters_at_once,
)
from tessera.engine.ops.cuda.linear.sm90_kernels import TILE_K
from tessera.engine.ops.cuda.training.sums import add_partials
from tessera.engine.ops.cuda.types import HALF_BYTES, ceil_div, cuda_type
from tessera.engine.tensor import Tensor, empty, float32


class Sm90TurnedMatmulParams(NamedTuple):
    x_map: TensorMap
    x_tail_map: TensorMap
    weight_map: TensorMap
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    tiles_m_in_l2: Int32
    stages: Int32
    accumulate: Int32


class Sm90TurnedWideParams(NamedTuple):
    x_map: TensorMap
    weight_map: TensorMap
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    tiles_m_in_l2: Int32
    stages: Int32
    accumulate: Int32


SM90_TURNED_MATMUL = KernelSpec(
    file="training/sm90_turned_matmul.cu",
    name="sm90_turned_matmul_kernel",
    template=("T", "Out", "TURNED_X", "WARPGROUPS_M", "WARPGROUP_N", "SHARING"),
    params=Sm90TurnedMatmulParams,
    min_arch=90,
    arch_specific=True,
    on_demand=True,
)
SM90_TURNED_WIDE = KernelSpec(
    file="training/sm90_turned_wide.cu",
    name="sm90_turned_wide_kernel",
    template=("T", "Out", "TURNED_X"),
    params=Sm90TurnedWideParams,
    min_arch=90,
    arch_specific=True,
    on_demand=True,
)
SPECS = (SM90_TURNED_MATMUL, SM90_TURNED_WIDE)
declare_header("training_sm90", __name__, params=(Sm90TurnedMatmulParams, Sm90TurnedWideParams))

TILES = (Tile(2, 256), Tile(2, 128), Tile(2, 64), Tile(1, 64))
SHARED_TILES = TILES[:2]  # that pairs of blocks may share
PLANS = (*map(Plan, TILES), *(Plan(tile, sharing=2) for tile in SHARED_TILES), WIDE_PLAN)
MAX_SLICES = 16
MIN_SLICE_STEPS = 8  # along k
MAX_PARTIAL_BYTES = 1 << 27
SUM_BYTES_PER_US = 2.5e6  # of adding slices
LAUNCH_US = 2.0


@dataclass(frozen=True)
class TurnedPlan:
    """How a product is divided.

    Attributes:
        plan: into tiles; its splits are 1.
        slices: of k, each summed by blocks of its own.
    """

    plan: Plan
    slices: int = 1

    @property
    def spec(self) -> KernelSpec[Any]:
        return SM90_TURNED_WIDE if self.plan.tile.wide else SM90_TURNED_MATMUL

    def template(self, dtype: str, out_dtype: str, *, turned_x: bool) -> tuple[str, ...]:
        sizes = () if self.plan.tile.wide else self.plan.template(dtype, out_dtype)[2:]
        return (dtype, out_dtype, "true" if turned_x else "false", *sizes)

    def cost(
        self,
        num_rows: int,
        out_features: int,
        in_features: int,
        at_once: int,
        costs: Sm90Costs,
        *,
        accumulates: bool,
    ) -> float:
        """Microseconds beyond what every plan takes, where `at_once` clusters run at a time.

        `accumulates`: to a float32 result, else results are of 16 bits.
        """
        tile = self.plan.tile
        rounds = ceil_div(self.plan.count(num_rows, out_features) * self.slices, at_once)
        steps = ceil_div(ceil_div(in_features, TILE_K), self.slices)
        products = rounds * steps * costs.step_us[tile.warpgroups_m, tile.warpgroup_n]
        reading = HALF_BYTES * (num_rows + out_features) * in_features / costs.weight_bytes_per_us
        moved = 1 if not accumulates else 2 if self.slices > 1 else 4  # times 16 bits a result
        storing = moved * costs.store_us * rounds * tile.m * tile.n / (128 * 256)
        adding = self.partial_bytes(num_rows, out_features) / SUM_BYTES_PER_US + LAUNCH_US if self.slices > 1 else 0.0
        return max(products, reading) + costs.overlap * min(products, reading) + storing + adding

    def partial_bytes(self, num_rows: int, out_features: int) -> int:
        return self.slices * num_rows * out_features * float32.itemsize

    def config(
        self, num_rows: int, out_features: int, out_itemsize: int, at_once: int, max_shared_bytes: int
    ) -> LaunchConfig:
        """Of a launch where `at_once` clusters run at a time; blocks of slices have one tile each."""
        count, plan = self.plan.count(num_rows, out_features), self.plan
        clusters = count if self.slices > 1 else min(count, at_once)
        ring_bytes = plan.stages(out_itemsize, max_shared_bytes) * plan.stage_bytes
        return LaunchConfig(
            (clusters * plan.sharing, self.slices, 1),
            (BLOCK_THREADS, 1, 1),
            ring_bytes + plan.bytes_beside_ring(out_itemsize),
            plan.sharing,
        )


def choose_plan(
    num_rows: int,
    out_features: int,
    in_features: int,
    clusters_at_once: tuple[int, ...],
    costs: Sm90Costs,
    *,
    sliced: bool,
) -> TurnedPlan:
    """The plan of least cost; `clusters_at_once[s - 1]` clusters of s blocks run at a time.

    `sliced`: sums, which are added to a float32 result, may be divided into slices. Pairs of blocks share what they
    read from `costs.min_sharing_rows` rows on.
    """
    steps = ceil_div(in_features, TILE_K)
    shares = num_rows >= costs.min_sharing_rows and clusters_at_once[1] > 0
    most = max(1, min(MAX_SLICES, steps // MIN_SLICE_STEPS)) if sliced else 1
    tilings = [Plan(tile, sharing=2 if shares and tile in SHARED_TILES else 1) for tile in TILES]
    if clusters_at_once[1]:
        tilings.append(WIDE_PLAN)
    plans = [TurnedPlan(plan, slices) for plan in tilings for slices in range(1, most + 1)]

    def fits(plan: TurnedPlan) -> bool:
        return plan.slices == 1 or plan.partial_bytes(num_rows, out_features) <= MAX_PARTIAL_BYTES

    def cost(plan: TurnedPlan) -> float:
        at_once = clusters_at_once[plan.plan.sharing - 1]
        return plan.cost(num_rows, out_features, in_features, at_once, costs, accumulates=sliced)

    return min(filter(fits, plans), key=cost)


@lru_cache(maxsize=1024)
def _plan(device: CudaDevice, dtype: str, sizes: tuple[int, int, int], sliced: bool) -> TurnedPlan:
    return choose_plan(*sizes, count_clusters_at_once(device, dtype), costs_of(device).sm90, sliced=sliced)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these products launch for elements of these C types."""
    return [
        (plan.spec, plan.template(dtype, out, turned_x=turned_x))
        for dtype in dtypes
        if dtype != "float"
        for plan in map(TurnedPlan, PLANS)
        for out, turned_x in ((dtype, False), ("float", True))
    ]


def can_read(device: CudaDevice, *matrices: Tensor) -> bool:
    """Whether tensor maps and products take these as operands: 16-bit elements in whole segments of 16 bytes."""
    return SM90_TURNED_MATMUL.supports(device.arch) and all(
        matrix.size and matrix.dtype.itemsize == HALF_BYTES and matrix.shape[1] % MULTIPLE == 0 and _aligned(matrix)
        for matrix in matrices
    )


def can_write(out: Tensor) -> bool:
    return out.shape[1] % MULTIPLE == 0 and _aligned(out)


def _aligned(tensor: Tensor) -> bool:
    return tensor.pointer % ALIGNMENT == 0


def launch(
    device: CudaDevice,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    turned_x: bool,
    accumulate: bool = False,
    plan: TurnedPlan | None = None,
) -> None:
    """x [M, K] times weight [K, N] to out [M, N] of their dtype; `turned_x`: x [K, M] transposed, to float32.

    x may have zeros behind the weight's K columns, or, turned, columns behind M. With `accumulate` the product is added
    to a float32 `out`.
    """
    num_rows, out_features = out.shape
    in_features = weight.shape[0]
    dtype = cuda_type(x.dtype)
    if plan is None:
        plan = _plan(device, dtype, (num_rows, out_features, in_features), out.dtype == float32)
    tiles, at_once = plan.plan, count_clusters_at_once(device, dtype)[plan.plan.sharing - 1]
    sizes = (num_rows, out_features, out.dtype.itemsize, at_once, device.max_shared_bytes)
    partial = out if plan.slices == 1 else empty((plan.slices, *out.shape), float32, device)
    x_map = box_map(x, TILE_K if turned_x else tiles.tile.m)
    common: dict[str, Any] = {
        "x_map": x_map,
        "weight_map": box_map(weight, TILE_K),
        "out": partial,
        "num_rows": num_rows,
        "out_features": out_features,
        "in_features": in_features,
        "tiles_m_in_l2": ROWS_IN_L2 // (tiles.tile.m * tiles.sharing),
        "stages": tiles.stages(out.dtype.itemsize, device.max_shared_bytes),
        "accumulate": accumulate and plan.slices == 1,
    }
    template, config = plan.template(dtype, cuda_type(out.dtype), turned_x=turned_x), plan.config(*sizes)
    if tiles.tile.wide:
        device.launch(SM90_TURNED_WIDE, template, config, Sm90TurnedWideParams(**common))
    else:
        x_tail_map = x_map if turned_x else box_map(x, num_rows % tiles.tile.m or tiles.tile.m)
        device.launch(SM90_TURNED_MATMUL, template, config, Sm90TurnedMatmulParams(x_tail_map=x_tail_map, **common))
    if plan.slices > 1:
        add_partials(device, partial, out, accumulate=accumulate)
