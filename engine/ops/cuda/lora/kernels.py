"""The kernels of adapters: their parameters and constants."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutFloat, OutInt, OutT, TensorMap
from tessera.engine.ops.cuda.types import NORM_CHUNKS


class GroupRowsParams(NamedTuple):
    slots: InInt
    groups: OutInt
    num_rows: Int32
    num_tiles: Int32
    num_slots: Int32


class LoraShrinkNormParams(NamedTuple):
    x: InT
    gains: InT
    a: InT
    factors: InFloat
    ranks: InInt
    groups: InInt
    normed: OutT
    inverses: OutFloat
    shrunk: OutFloat
    num_rows: Int32
    num_tiles: Int32
    num_slots: Int32
    width: Int32
    parts: Int32
    max_rank: Int32
    row_threads: Int32
    eps: Float32


class LoraShrinkParams(NamedTuple):
    x: InT
    a: InT
    factors: InFloat
    ranks: InInt
    groups: InInt
    shrunk: OutFloat
    num_rows: Int32
    num_slots: Int32
    width: Int32
    parts: Int32
    max_rank: Int32


class LoraExpandParams(NamedTuple):
    shrunk: InFloat
    inverses: InFloat
    b: InT
    factors: InFloat
    ranks: InInt
    slots: InInt
    groups: InInt
    out: OutT
    activated: OutT
    next_a: InT
    next_factors: InFloat
    next_shrunk: OutFloat
    num_rows: Int32
    num_tiles: Int32
    num_slots: Int32
    features: Int32
    parts: Int32
    max_rank: Int32
    slices: Int32
    in_halves: Int32
    second: Int32
    third: Int32


class LoraShrinkAnyParams(NamedTuple):
    x: InT
    a: InT
    factors: InFloat
    ranks: InInt
    groups: InInt
    shrunk: OutFloat
    num_rows: Int32
    width: Int32
    parts: Int32
    max_rank: Int32


class LoraExpandAnyParams(NamedTuple):
    shrunk: InFloat
    b: InT
    ranks: InInt
    groups: InInt
    out: OutT
    num_rows: Int32
    features: Int32
    parts: Int32
    max_rank: Int32
    second: Int32
    third: Int32


class Sm90AdaptedMatmulParams(NamedTuple):
    x_map: TensorMap
    x_tail_map: TensorMap
    weight_map: TensorMap
    b_map: TensorMap
    bias: InT
    shrunk: InFloat
    inverses: InFloat
    factors: InFloat
    ranks: InInt
    slots: InInt
    out: OutT
    num_rows: Int32
    num_slots: Int32
    out_features: Int32
    in_features: Int32
    parts: Int32
    second: Int32
    third: Int32
    slices: Int32
    splits: Int32
    stages: Int32
    accumulate: Int32
    gated: Int32


# Writes what kernels after the next one read before they wait, so the next one does not start early.
GROUP_ROWS = KernelSpec(
    file="lora/lora.cu",
    name="group_rows_kernel",
    template=(),
    params=GroupRowsParams,
    overlaps=True,
    writes_weights=True,
    on_demand=True,
)
LORA_SHRINK = KernelSpec(
    file="lora/products.cu",
    name="lora_shrink_kernel",
    template=("T",),
    params=LoraShrinkParams,
    overlaps=True,
    on_demand=True,
)
LORA_SHRINK_NORM = KernelSpec(
    file="lora/shrink_norm.cu",
    name="lora_shrink_norm_kernel",
    template=("T",),
    params=LoraShrinkNormParams,
    overlaps=True,
    on_demand=True,
)
LORA_EXPAND = KernelSpec(
    file="lora/products.cu",
    name="lora_expand_kernel",
    template=("T", "GROUPS", "STEPS", "MOST_RANKS", "GATED"),
    params=LoraExpandParams,
    overlaps=True,
    on_demand=True,
)
LORA_SHRINK_ANY = KernelSpec(
    file="lora/lora.cu",
    name="lora_shrink_any_kernel",
    template=("T",),
    params=LoraShrinkAnyParams,
    overlaps=True,
    on_demand=True,
)
LORA_EXPAND_ANY = KernelSpec(
    file="lora/lora.cu",
    name="lora_expand_any_kernel",
    template=("T",),
    params=LoraExpandAnyParams,
    overlaps=True,
    on_demand=True,
)
SM90_ADAPTED_MATMUL = KernelSpec(
    file="lora/sm90_adapted_matmul.cu",
    name="sm90_adapted_matmul_kernel",
    template=("T", "WARPGROUP_N", "GATED"),
    params=Sm90AdaptedMatmulParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)

LORA_SLOTS = Constant(1024, "most slots")
LORA_STAGED = Constant(1024, "slots of rows that are in shared memory at a time")
LORA_ROWS = Constant(16, "rows of a tile, at most")
LORA_PARTS = Constant(3, "parts of a weight, at most")
LORA_RANKS = Constant(16, "of a block that multiplies with A")
LORA_CHUNK = Constant(128, "of the width, that a warp of lora_shrink_kernel takes at a time")
LORA_SHRINK_WARPS = Constant(8)
LORA_SLICE = Constant(LORA_SHRINK_WARPS * LORA_CHUNK, "of the width, of one sum of its chunks")
LORA_EXPAND_WARPS = Constant(4)
LORA_NORM_CHUNKS = Constant(NORM_CHUNKS, "segments of a thread of a norm beside a product with A")
LORA_WARP_RANKS = Constant(LORA_RANKS // LORA_SHRINK_WARPS, "of a warp of lora_shrink_any_kernel")
LORA_FEATURES = Constant(256, "of a block of lora_expand_any_kernel")
LORA_STAGE = Constant(32, "ranks that it has in shared memory at a time")
declare_header(
    "lora",
    __name__,
    {
        "LORA_SLOTS": LORA_SLOTS,
        "LORA_STAGED": LORA_STAGED,
        "LORA_ROWS": LORA_ROWS,
        "LORA_PARTS": LORA_PARTS,
        "LORA_RANKS": LORA_RANKS,
        "LORA_CHUNK": LORA_CHUNK,
        "LORA_SHRINK_WARPS": LORA_SHRINK_WARPS,
        "LORA_SLICE": LORA_SLICE,
        "LORA_EXPAND_WARPS": LORA_EXPAND_WARPS,
        "LORA_NORM_CHUNKS": LORA_NORM_CHUNKS,
        "LORA_WARP_RANKS": LORA_WARP_RANKS,
        "LORA_FEATURES": LORA_FEATURES,
        "LORA_STAGE": LORA_STAGE,
    },
    (
        GroupRowsParams,
        LoraShrinkParams,
        LoraShrinkNormParams,
        LoraExpandParams,
        LoraShrinkAnyParams,
        LoraExpandAnyParams,
    ),
)
declare_header("sm90_adapted", __name__, params=(Sm90AdaptedMatmulParams,))
