"""Products of few rows by experts' weights in MXFP4, of bfloat16.

A row's result depends neither on the other rows nor on their number, but on the variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InInt, InT, Int32, InUint, OutT
from tessera.engine.formats import KERNEL_FORMATS, PackedFormat
from tessera.engine.formats.packed import STEP
from tessera.engine.ops.cuda.moe.blocks import IN_FEATURES_MULTIPLE, ExpertBlockOperands
from tessera.engine.ops.cuda.moe.experts import ACTIVATIONS
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, HALF_BYTES, WARP_SIZE, aligned, ceil_div
from tessera.engine.tensor import bfloat16


class ExpertMxfp4Params(NamedTuple):
    x: InT
    codes: InUint
    headers: InUint
    bias: InT
    offsets: InInt
    pairs: InInt
    out: OutT
    num_experts: Int32
    out_features: Int32
    in_features: Int32
    top_k: Int32
    activation: Int32
    settled: Int32


EXPERT_MXFP4 = KernelSpec(
    file="moe/expert_mxfp4.cu",
    name="expert_mxfp4_kernel",
    template=("T", "TOKENS", "TEAMS", "SLICES", "AHEAD"),
    params=ExpertMxfp4Params,
    overlaps=True,
    on_demand=True,
)
SPECS = (EXPERT_MXFP4,)
declare_header("expert_mxfp4", __name__, params=(ExpertMxfp4Params,))

FORMAT = KERNEL_FORMATS["MXFP4"]
TILE_ROWS = 16  # of a weight
STEP_BYTES = TILE_ROWS * (STEP // 2 + 4)  # of a tile: codes, and a word of exponents for each row
STATIC_BYTES = 5632  # of a block's shared memory, at most, with what the driver reserves, but for sums
SUM_BYTES = 16  # of a lane, of 8 rows of x
WARPS = 16  # on a multiprocessor, of which each has 128 registers
MOST_TILES = 1 << 20  # that the kernel's quotients are exact for


@dataclass(frozen=True)
class Mxfp4Tile:
    """A variant of the kernel: the most rows of x, warps with a tile each, or warps that share k of one, and steps of a
    warp on their way.
    """

    tokens: int
    teams: int
    slices: int
    ahead: int

    @property
    def template(self) -> tuple[str, ...]:
        return (C_TYPE_NAMES[bfloat16], str(self.tokens), str(self.teams), str(self.slices), str(self.ahead))

    @property
    def threads(self) -> int:
        return self.teams * self.slices * WARP_SIZE

    def shared_bytes(self, in_features: int) -> int:
        """Dynamic shared memory of a block: rows of x, whole steps; and each warp's ring."""
        rows = ceil_div(in_features, STEP) * STEP * self.tokens * HALF_BYTES
        return rows + self.teams * self.slices * self.ahead * STEP_BYTES

    def blocks(self, in_features: int, shared_limit: int) -> int:
        """That a multiprocessor has room for."""
        sums = 2 * self.slices * WARP_SIZE * self.tokens // 8 * SUM_BYTES if self.slices > 1 else 0
        of_block = self.shared_bytes(in_features) + sums + STATIC_BYTES
        return min(WARPS // (self.teams * self.slices), shared_limit // of_block)


# That of the most rows first; those behind it have room for longer rows. With three steps ahead a multiprocessor has
# 50 KB on their way, half more than memory's latency takes; beside 32 rows of 2880 elements there is room for two.
FEWEST, FEW = Mxfp4Tile(8, 1, 8, 4), Mxfp4Tile(8, 1, 4, 4)
TILES = (Mxfp4Tile(32, 16, 1, 2), Mxfp4Tile(16, 16, 1, 3), FEWEST, FEW)
MOST_TOKENS_OF_FEW = 8  # of a step, whatever experts they choose
ROWS_OF_WIDEST = 8  # of an expert on average, from which on tiles are of 32 rows
MOST_ROWS = 192  # of an expert on average; more are multiplied by dequantised weights


def kernels_of(format: PackedFormat, dtype: str) -> list[Instantiation]:
    """All that products by experts' weights of this format launch for elements of this C type."""
    if format != FORMAT or dtype != C_TYPE_NAMES[bfloat16]:
        return []
    return [(EXPERT_MXFP4, tile.template) for tile in TILES]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    return [kernel for dtype in dtypes for kernel in kernels_of(FORMAT, dtype)]


def choose_tile(num_pairs: int, num_experts: int, top_k: int) -> Mxfp4Tile:
    """By the rows that experts have; a step of few tokens has few tiles, each for the warps of a block."""
    if num_pairs > num_experts * ROWS_OF_WIDEST:
        return TILES[0]
    return TILES[1] if num_pairs > top_k * MOST_TOKENS_OF_FEW else FEWEST


def launch(device: CudaDevice, operands: ExpertBlockOperands, *, settled: bool) -> bool:
    """Submit the product with its activation; False, and nothing done, where the kernel cannot. `settled` as in
    `decode.launch`.
    """
    x, weight, routed, gathers, activation, out = operands
    (part,) = weight.parts
    num_experts, num_pairs, top_k = routed.offsets.size - 1, routed.pairs.size, routed.experts.shape[1]
    in_features, features = part.shape[1], out.shape[1]
    if part.format != FORMAT or x.dtype != bfloat16 or activation not in ACTIVATIONS:
        return False
    if in_features % IN_FEATURES_MULTIPLE or not aligned(16, x):
        return False
    tiles_of_expert = ceil_div(features, TILE_ROWS if activation is None else TILE_ROWS // 2)
    chosen = choose_tile(num_pairs, num_experts, top_k)
    fitting = (tile for tile in TILES[TILES.index(chosen) :] if tile.blocks(in_features, device.max_shared_bytes))
    tile = next(fitting, None)
    if tile is None:
        return False
    most = tiles_of_expert * min(num_pairs, num_experts + num_pairs // tile.tokens)
    if most > MOST_TILES:
        return False
    params = ExpertMxfp4Params(
        x=x,
        codes=part.tensors["codes"],
        headers=part.tensors["headers"],
        bias=weight.bias,
        offsets=routed.offsets,
        pairs=routed.pairs if gathers else None,
        out=out,
        num_experts=num_experts,
        out_features=weight.shape[0] // num_experts,
        in_features=in_features,
        top_k=top_k,
        activation=ACTIVATIONS[activation],
        settled=settled,
    )
    blocks = min(most, tile.blocks(in_features, device.max_shared_bytes) * device.multiprocessors)
    config = LaunchConfig((blocks, 1, 1), (tile.threads, 1, 1), tile.shared_bytes(in_features))
    device.launch(EXPERT_MXFP4, tile.template, config, params)
    return True
