"""The product of 2 to 16 rows by a weight in quantised blocks from sm_90 on: plans of `sm90_block_rows_kernel`.

Each row's result is that of `block_matmul_kernel`, whatever its number.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import SWIZZLE_BYTES, lines_map, words_map
from tessera.engine.formats import KERNEL_FORMATS, PackedFormat, WeightPart
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, HALF_BYTES, WARP_SIZE, ceil_div
from tessera.engine.tensor import Tensor, float32


class Sm90BlockRowsParams(NamedTuple):
    x: InT
    norm: InT
    codes_map: TensorMap
    headers_map: TensorMap
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    stages: Int32
    eps: Float32
    accumulate: Int32
    gated: Int32


SM90_BLOCK_ROWS = KernelSpec(
    file="linear/sm90_block_rows.cu",
    name="sm90_block_rows_kernel",
    template=("T", "Out", "F", "TOKENS"),
    params=Sm90BlockRowsParams,
    min_arch=90,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_BLOCK_ROWS,)

MAX_ROWS_STAGES = Constant(8, "of the ring")
declare_header("sm90_block_rows", __name__, {"MAX_ROWS_STAGES": MAX_ROWS_STAGES}, (Sm90BlockRowsParams,))

TOKENS = (8, 16)  # rows of x, at most
PARTS = 8  # of k, that warps share
WARPS = 2 * PARTS  # of a block
UNIT, TILE_ROWS = 8, 32  # of the weight
STEP = 128  # elements of each row that a warp takes at a time
WORD_BYTES, COPY_BYTES, BARRIER_BYTES, BESIDE_MULTIPLE = 4, 16, 8, 128
SUMS_STRIDE = TILE_ROWS + 4  # floats from token to token
RING_BYTES = 80 << 10  # wanted of the ring
MIN_STAGES = 2


def tokens_for(num_rows: int) -> int | None:
    """The variant for so many rows, if one is."""
    return next((tokens for tokens in TOKENS if 1 < num_rows <= tokens), None)


def supports(device: CudaDevice, format: PackedFormat, num_rows: int, in_features: int, *, normed: bool) -> bool:
    """Whether the kernel multiplies so many rows of so many elements."""
    spans, tokens = ceil_div(in_features, format.span), tokens_for(num_rows)
    return (
        SM90_BLOCK_ROWS.supports(device.arch)
        and tokens is not None
        and spans * format.header_words * WORD_BYTES % COPY_BYTES == 0
        and spans * format.span * format.lane_words // 8 % SWIZZLE_BYTES == 0
        and shared_bytes(format, tokens, in_features, MIN_STAGES, normed=normed) <= device.max_shared_bytes
    )


def _codes_bytes(format: PackedFormat) -> int:
    """Of a row of an item."""
    return PARTS * STEP * format.lane_words // 8


def _header_words(format: PackedFormat) -> int:
    """Of a row of an item."""
    return PARTS * STEP // format.span * format.header_words


def stage_bytes(format: PackedFormat) -> int:
    """Of an item: the codes and headers of each row of a tile."""
    return TILE_ROWS * (_codes_bytes(format) + _header_words(format) * WORD_BYTES)


def shared_bytes(format: PackedFormat, tokens: int, in_features: int, stages: int, *, normed: bool) -> int:
    """Dynamic shared memory of a block: the ring, `RowsShared`, the rows of x and the norm."""
    columns = ceil_div(in_features, PARTS * STEP) * PARTS * STEP
    beside = PARTS * tokens * (1 + SUMS_STRIDE) * float32.itemsize + 2 * MAX_ROWS_STAGES * BARRIER_BYTES
    beside = ceil_div(beside, BESIDE_MULTIPLE) * BESIDE_MULTIPLE
    return stages * stage_bytes(format) + beside + (tokens + normed) * columns * HALF_BYTES


def count_stages(format: PackedFormat, tokens: int, in_features: int, shared_limit: int, *, normed: bool) -> int:
    """Of the ring, up to RING_BYTES where there is room."""
    a_stage, wanted = stage_bytes(format), max(MIN_STAGES, RING_BYTES // stage_bytes(format))
    left = shared_limit - shared_bytes(format, tokens, in_features, 0, normed=normed)
    return min(MAX_ROWS_STAGES, left // a_stage, wanted)


class RowsOperands(NamedTuple):
    """`out` is the address of the part's first column, its rows `out_stride` elements apart."""

    x: Tensor
    norm: Tensor | None
    part: WeightPart
    bias: Tensor | None
    out: int
    out_stride: int
    eps: float


def launch(
    device: CudaDevice, operands: RowsOperands, dtype: str, out_dtype: str, *, gated: bool, accumulates: bool
) -> None:
    """Submit the product; `supports` has said that it can."""
    x, norm, part, bias, out, out_stride, eps = operands
    assert isinstance(part.format, PackedFormat)
    features, in_features = part.shape
    tokens, normed = tokens_for(x.shape[0]), norm is not None
    assert tokens is not None
    stages = count_stages(part.format, tokens, in_features, device.max_shared_bytes, normed=normed)
    grid = min(device.multiprocessors, ceil_div(features, TILE_ROWS))
    nbytes = shared_bytes(part.format, tokens, in_features, stages, normed=normed)
    config = LaunchConfig((grid, 1, 1), (WARPS * WARP_SIZE, 1, 1), nbytes)
    params = Sm90BlockRowsParams(
        x=x,
        norm=norm,
        codes_map=lines_map(part.tensors["codes"], UNIT, _codes_bytes(part.format) // SWIZZLE_BYTES),
        headers_map=words_map(part.tensors["headers"], UNIT, _header_words(part.format)),
        bias=bias,
        out=out,
        num_rows=x.shape[0],
        out_features=features,
        in_features=in_features,
        out_stride=out_stride,
        stages=stages,
        eps=eps,
        accumulate=accumulates,
        gated=gated,
    )
    template = (dtype, out_dtype, part.format.kernel_type, str(tokens))
    device.launch(SM90_BLOCK_ROWS, template, config, params)


def kernels_of(format: PackedFormat, dtype: str) -> set[Instantiation]:
    """All that products by a weight of this format launch for elements of this C type."""
    outs = (dtype, C_TYPE_NAMES[float32])
    return {(SM90_BLOCK_ROWS, (dtype, out, format.kernel_type, str(tokens))) for out in outs for tokens in TOKENS}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != C_TYPE_NAMES[float32]]
    formats = KERNEL_FORMATS.values()
    return [kernel for dtype in halves for format in formats for kernel in sorted(kernels_of(format, dtype), key=str)]
