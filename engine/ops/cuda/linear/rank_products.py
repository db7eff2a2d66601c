"""Products of one row around a sum over ranks: the first sends its part of the sum, the second takes what came."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutT, Pointer, Uint64
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cuda.linear.decode import (
    HALF_K,
    SEGMENT_BYTES,
    SIZES,
    UNIT,
    DecodeTile,
    choose_decode_tile,
    limits_of,
)
from tessera.engine.ops.cuda.linear.problem import FUSED_GATES, GELU_GATE, SILU_GATE
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, SEGMENT, WARP_SIZE, aligned
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.tensor import bfloat16

# Whether products take a row's sum over ranks; else a kernel between them adds it up.
LEAVES_SUMS = True
HALVES = Constant(2, "of 32 elements of k that a warp takes at a time")
VECTORS = (2, 4)  # of eight elements, of a lane
DTYPE = C_TYPE_NAMES[bfloat16]  # has the range of a float: the norm's root may divide the sums
Boxes = Annotated[Pointer, "const unsigned long long*"]


class MatmulToRanksParams(NamedTuple):
    x: InT
    weight: InT
    bias: InT
    out: OutT
    boxes: Boxes
    out_features: Int32
    in_features: Int32
    half: Int32
    rank: Int32
    ranks: Int32


class MatmulOfRanksParams(NamedTuple):
    x: InT
    update: InT
    sum: OutT
    norm: InT
    weight: InT
    bias: InT
    out: OutT
    boxes: Boxes
    patience: Uint64
    out_features: Int32
    in_features: Int32
    eps: Float32
    gated: Int32
    half: Int32
    rank: Int32
    ranks: Int32


MATMUL_TO_RANKS = KernelSpec(
    "collectives/products.cu",
    "matmul_to_ranks_kernel",
    ("T", "UNITS", "STAGES"),
    MatmulToRanksParams,
    overlaps=True,
    on_demand=True,
)
MATMUL_OF_RANKS = KernelSpec(
    "collectives/products.cu",
    "matmul_of_ranks_kernel",
    ("T", "UNITS", "STAGES", "VECTORS"),
    MatmulOfRanksParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (MATMUL_TO_RANKS, MATMUL_OF_RANKS)
declare_header("products", __name__, {"HALVES": HALVES}, (MatmulToRanksParams, MatmulOfRanksParams))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    if DTYPE not in dtypes:
        return []
    sizes = [(str(units), str(stages)) for units, stages in SIZES[1]]
    found: list[Instantiation] = [(MATMUL_TO_RANKS, (DTYPE, *size)) for size in sizes]
    return found + [(MATMUL_OF_RANKS, (DTYPE, *size, str(vectors))) for size in sizes for vectors in VECTORS]


class RowProduct(NamedTuple):
    """The plan of a one-row product.

    Attributes:
        features, in_features: of the result and of the row.
        gate: of an activation; 0 without.
        ends_half: it sends its part of the sum; else it takes one.
    """

    features: int
    in_features: int
    gate: int
    ends_half: bool
    tile: DecodeTile

    @property
    def kernel(self) -> Instantiation:
        tile = DTYPE, str(self.tile.units), str(self.tile.stages)
        if self.ends_half:
            return MATMUL_TO_RANKS, tile
        of_warp = self.tile.steps(self.in_features) * self.tile.halves * HALF_K // SEGMENT
        vectors = next(vectors for vectors in VECTORS if of_warp <= vectors * WARP_SIZE)
        return MATMUL_OF_RANKS, (*tile, str(vectors))

    def config(self, device: CudaDevice) -> LaunchConfig:
        sizes = self.features, self.in_features, limits_of(device)
        return self.tile.config(*sizes, normed=False, ends_half=self.ends_half)


def plan(
    device: CudaDevice, weight: LinearWeight, activation: Activation | None, *, ends_half: bool
) -> RowProduct | None:
    """None where these kernels are not for it; one that ends a half sends its part of the sum, others take one."""
    values, bias = weight.dense, weight.bias
    if values is None or values.dtype != bfloat16 or weight.adapters is not None:
        return None
    (rows, in_features), gate = values.shape, 0
    if activation is not None:
        if activation not in FUSED_GATES or bias is not None:
            return None
        gate = SILU_GATE if activation == "silu_mul" else GELU_GATE
    features = rows // 2 if gate else rows
    if features % UNIT or in_features % SEGMENT or not aligned(SEGMENT_BYTES, values):
        return None
    tile = choose_decode_tile(
        1,
        features,
        in_features,
        limits_of(device),
        gated=bool(gate),
        normed=False,
        logits=False,
        float_range=True,
        ends_half=ends_half,
    )
    return None if tile is None or tile.tokens != 1 else RowProduct(features, in_features, gate, ends_half, tile)
