"""The kernels of products on sm_90a: their parameters and constants."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.cuda.params import InT, Int32, OutOut, OutT, TensorMap


class Sm90MatmulParams(NamedTuple):
    x_map: TensorMap
    x_tail_map: TensorMap
    weight_map: TensorMap
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    splits: Int32
    tiles_m_in_l2: Int32
    stages: Int32
    accumulate: Int32
    gated: Int32


class Sm90MatmulWideParams(NamedTuple):
    x_map: TensorMap
    weight_map: TensorMap
    bias: InT
    out: OutT
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    tiles_m_in_l2: Int32
    stages: Int32
    accumulate: Int32
    gated: Int32


SM90_MATMUL = KernelSpec(
    file="linear/sm90_matmul.cu",
    name="sm90_matmul_kernel",
    template=("T", "Out", "WARPGROUPS_M", "WARPGROUP_N", "SHARING"),
    params=Sm90MatmulParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
)
SM90_MATMUL_WIDE = KernelSpec(
    file="linear/sm90_matmul_wide.cu",
    name="sm90_matmul_wide_kernel",
    template=("T",),
    params=Sm90MatmulWideParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
)

WGMMA_M = Constant(64)
TILE_K = Constant(64, "2-byte elements in SWIZZLE_BYTES")
MAX_STAGES = Constant(12)
WARP_ROWS = Constant(16, "of a product, that one warp holds")
CHUNK_PADDING = Constant(8, "elements: 8 rows of 16 bytes fall into different banks")
CONSUMER_WARPGROUPS = Constant(2)
CHUNK_COLUMNS = Constant(64, "of a warp's rows, that pass through shared memory at a time")
SPLITTABLE_N = Constant(128, "the widest warp group whose k may be split: others' sums find no room")
WIDE_WARPGROUPS_M = Constant(3)
WIDE_TILE_N = Constant(256)
WIDE_SHARING = Constant(2, "blocks of a cluster")
WIDE_CHUNK_COLUMNS = Constant(32, "of a warp's rows, that pass through shared memory at a time")
declare_header(
    "sm90_product",
    __name__,
    {
        "WGMMA_M": WGMMA_M,
        "TILE_K": TILE_K,
        "MAX_STAGES": MAX_STAGES,
        "WARP_ROWS": WARP_ROWS,
        "CHUNK_PADDING": CHUNK_PADDING,
    },
)
declare_header(
    "sm90_matmul",
    __name__,
    {
        "CONSUMER_WARPGROUPS": CONSUMER_WARPGROUPS,
        "CHUNK_COLUMNS": CHUNK_COLUMNS,
        "SPLITTABLE_N": SPLITTABLE_N,
    },
    (Sm90MatmulParams,),
)
declare_header(
    "sm90_matmul_wide",
    __name__,
    {
        "WARPGROUPS_M": WIDE_WARPGROUPS_M,
        "TILE_N": WIDE_TILE_N,
        "SHARING": WIDE_SHARING,
        "CHUNK_COLUMNS": WIDE_CHUNK_COLUMNS,
    },
    (Sm90MatmulWideParams,),
)
