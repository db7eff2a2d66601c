"""Products of few rows by experts' weights in quantised blocks.

A row's result depends neither on the other rows nor on their number, as that of `quant.product`.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InInt, InT, Int32, InUint, OutT
from tessera.engine.formats import KERNEL_FORMATS, LinearWeight, PackedFormat
from tessera.engine.ops.cuda.moe.decode import STATIC_BYTES
from tessera.engine.ops.cuda.moe.experts import ACTIVATIONS
from tessera.engine.ops.cuda.quant.product import THREADS, UNIT, BlockTile
from tessera.engine.ops.cuda.types import HALF_BYTES, aligned, ceil_div, cuda_type
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.ops.moe_interface import Routed
from tessera.engine.tensor import Tensor


class ExpertBlockMatmulParams(NamedTuple):
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


EXPERT_BLOCK_MATMUL = KernelSpec(
    file="moe/expert_blocks.cu",
    name="expert_block_matmul_kernel",
    template=("T", "F", "TOKENS", "UNITS", "STAGES"),
    params=ExpertBlockMatmulParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (EXPERT_BLOCK_MATMUL,)
declare_header("expert_blocks", __name__, params=(ExpertBlockMatmulParams,))

TILES = {
    8: (BlockTile(8, 4, 3, 2), BlockTile(8, 2, 2)),
    16: (BlockTile(16, 4, 2, 2), BlockTile(16, 2, 2)),
    32: (BlockTile(32, 4, 2), BlockTile(32, 2, 2)),
}
IN_FEATURES_MULTIPLE = 32


class ExpertBlockOperands(NamedTuple):
    """As `ExpertOperands`, of a weight with one packed part."""

    x: Tensor
    weight: LinearWeight
    routed: Routed
    gathers: bool
    activation: Activation | None
    out: Tensor


def _template(tile: BlockTile, dtype: str, format: PackedFormat) -> tuple[str, ...]:
    return (dtype, format.kernel_type, str(tile.tokens), str(tile.units), str(tile.stages))


def kernels_of(format: PackedFormat, dtype: str) -> set[Instantiation]:
    """All that products by experts' weights of this format launch for elements of this C type."""
    return {(EXPERT_BLOCK_MATMUL, _template(tile, dtype, format)) for tiles in TILES.values() for tile in tiles}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    formats = KERNEL_FORMATS.values()
    return [kernel for dtype in halves for format in formats for kernel in sorted(kernels_of(format, dtype), key=str)]


def choose_tile(num_pairs: int, num_experts: int, format: PackedFormat, shared_limit: int) -> BlockTile | None:
    """For as many rows at a time as experts have on average, twice at most; None where no variant fits."""
    average = num_pairs / num_experts
    tokens = 8 if average <= 4 else 16 if average <= 8 else 32
    limit = shared_limit - 2 * STATIC_BYTES
    fitting = (tile for tile in TILES[tokens] if tile.fits(format, 0, limit, normed=False))
    return next(fitting, None)


def launch(device: CudaDevice, operands: ExpertBlockOperands) -> bool:
    """Submit the product with its activation; False, and nothing done, where no variant can."""
    x, weight, routed, gathers, activation, out = operands
    (part,) = weight.parts
    format, num_experts, num_pairs = part.format, routed.offsets.size - 1, routed.pairs.size
    if not isinstance(format, PackedFormat) or x.dtype.itemsize != HALF_BYTES or activation not in ACTIVATIONS:
        return False
    fits = part.shape[1] % IN_FEATURES_MULTIPLE == 0 and out.shape[1] % 2 == 0
    tile = choose_tile(num_pairs, num_experts, format, device.max_shared_bytes)
    if tile is None or not fits or not aligned(16, x) or not aligned(4, out, weight.bias):
        return False
    params = ExpertBlockMatmulParams(
        x=x,
        codes=part.tensors["codes"],
        headers=part.tensors["headers"],
        bias=weight.bias,
        offsets=routed.offsets,
        pairs=routed.pairs if gathers else None,
        out=out,
        num_experts=num_experts,
        out_features=weight.shape[0] // num_experts,
        in_features=part.shape[1],
        top_k=routed.experts.shape[1],
        activation=ACTIVATIONS[activation],
    )
    units = ceil_div(params.out_features, UNIT * tile.units)
    most = units * min(num_pairs, num_experts + num_pairs // tile.tokens)
    blocks = min(most, tile.blocks * device.multiprocessors)
    config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), tile.shared_bytes(format, 0, normed=False))
    device.launch(EXPERT_BLOCK_MATMUL, _template(tile, cuda_type(x.dtype), format), config, params)
    return True
