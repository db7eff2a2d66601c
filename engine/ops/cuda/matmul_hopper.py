"""Matrix products of many rows on sm_90a: how each shape is divided among the device's multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from engine.cuda.device import CudaDevice
from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.cuda.tensor_map import ALIGNMENT, box_map
from engine.ops.cuda.types import WARP_SIZE, ceil_div, cuda_type
from engine.tensor import Tensor, bfloat16, float16, float32

ARCH = "90a"

MATMUL_HOPPER = KernelSpec(
    file="matmul_hopper.cu",
    name="matmul_hopper_kernel",
    template=("T", "Out", "WARPGROUPS_M", "WARPGROUP_N"),
    parameters=(
        ("x_map", "tensor_map"),
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
SPECS = (MATMUL_HOPPER,)

# As in cuda_src/matmul_hopper.cu.
TILE_K = 64
CONSUMER_WARPS = 8
BLOCK_THREADS = (CONSUMER_WARPS + 4) * WARP_SIZE
MAX_STAGES = 8
HALF_BYTES = 2
SLOT_BYTES = CONSUMER_WARPS * WARP_SIZE * 16
STAGING_BYTES = CONSUMER_WARPS * 16 * (64 + 8) * HALF_BYTES

BARRIER_BYTES = 1024  # static shared memory, up to where the ring may begin
ROWS_IN_L2 = 2048
MULTIPLE = 8  # of in_features and of the results' columns


@dataclass(frozen=True)
class Plan:
    """How a product is divided.

    Attributes:
        warpgroups_m: of a block's two warp groups along the rows; the others lie along the columns.
        warpgroup_n: columns of one warp group, which has 64 rows.
        splits: slices of in_features, one for each block of a cluster.
    """

    warpgroups_m: int
    warpgroup_n: int
    splits: int = 1

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups_m

    @property
    def tile_n(self) -> int:
        return self.warpgroup_n * (2 // self.warpgroups_m)

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        return (dtype, out_dtype, str(self.warpgroups_m), str(self.warpgroup_n))

    def tiles(self, num_rows: int, out_features: int) -> int:
        return ceil_div(num_rows, self.tile_m) * ceil_div(out_features, self.tile_n)

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * TILE_K * HALF_BYTES

    def bytes_beside_ring(self, out_itemsize: int) -> int:
        """Of results on their way out and of the sums of other splits."""
        staging = STAGING_BYTES if out_itemsize == HALF_BYTES else 0
        return staging + (self.splits - 1) * self.share_bytes

    @property
    def share_bytes(self) -> int:
        """Of the sums that a split sends to another."""
        return 2 * ceil_div(self.warpgroup_n // 16, self.splits) * SLOT_BYTES

    def stages(self, out_itemsize: int, max_shared_bytes: int) -> int:
        room = max_shared_bytes - BARRIER_BYTES - self.bytes_beside_ring(out_itemsize)
        return min(MAX_STAGES, room // self.stage_bytes)

    def config(
        self, num_rows: int, out_features: int, out_itemsize: int, multiprocessors: int, max_shared_bytes: int
    ) -> LaunchConfig:
        tiles = self.tiles(num_rows, out_features)
        blocks = tiles * self.splits if self.splits > 1 else min(tiles, multiprocessors)
        ring_bytes = self.stages(out_itemsize, max_shared_bytes) * self.stage_bytes
        shared_bytes = ring_bytes + self.bytes_beside_ring(out_itemsize)
        return LaunchConfig((blocks, 1, 1), (BLOCK_THREADS, 1, 1), shared_bytes, self.splits)


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
    rows_in_l2: int = ROWS_IN_L2,
) -> None:
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    itemsize = out.dtype.itemsize
    config = plan.config(num_rows, out_features, itemsize, device.multiprocessors, device.max_shared_bytes)
    device.launch(
        MATMUL_HOPPER,
        plan.template(cuda_type(x.dtype), cuda_type(out.dtype)),
        config,
        box_map(x, plan.tile_m),
        box_map(weight, plan.warpgroup_n // (2 if silu_mul else 1)),
        bias,
        out,
        num_rows,
        out_features,
        in_features,
        plan.splits,
        rows_in_l2 // plan.tile_m,
        plan.stages(itemsize, device.max_shared_bytes),
        int(accumulate),
        int(silu_mul),
    )
