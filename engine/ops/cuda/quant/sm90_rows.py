"""The product of 2 to 16 rows by a weight in quantised blocks from sm_90 on: plans of `sm90_block_rows_kernel`.

Each row's result is that of `block_matmul_kernel`, or where k is cut into slices another, the same whatever the number
of rows.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import SWIZZLE_BYTES, lines_map, words_map
from tessera.engine.formats import KERNEL_FORMATS, PackedFormat, WeightPart
from tessera.engine.ops.cuda.quant.slices import MAX_SLICES
from tessera.engine.ops.cuda.quant.slices import launch as launch_add_slices
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
    slices: Int32
    eps: Float32
    accumulate: Int32
    gated: Int32
    followed: Int32
    follows: Int32


SM90_BLOCK_ROWS = KernelSpec(
    file="quant/sm90_block_rows.cu",
    name="sm90_block_rows_kernel",
    template=("T", "Out", "F", "TOKENS"),
    params=Sm90BlockRowsParams,
    min_arch=90,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_BLOCK_ROWS,)

MAX_ROWS_STAGES = Constant(8, "of the ring")
STORING_WARPS = Constant(4, "which add up a tile's sums and store them")
declare_header(
    "sm90_block_rows",
    __name__,
    {"MAX_ROWS_STAGES": MAX_ROWS_STAGES, "STORING_WARPS": STORING_WARPS},
    (Sm90BlockRowsParams,),
)

TOKENS = (8, 16)  # rows of x, at most
PARTS = 8  # of k, that warps share
WARPS = 2 * PARTS + STORING_WARPS + 1  # of a block, of which one copies
UNIT, TILE_ROWS = 8, 32  # of the weight
STEP = 128  # elements of each row that a warp takes at a time
WORD_BYTES, COPY_BYTES, BARRIER_BYTES, BESIDE_MULTIPLE = 4, 16, 8, 128
SUMS_STRIDE = TILE_ROWS + 4  # floats from token to token
RING_BYTES = 80 << 10  # wanted of the ring
MIN_STAGES = 2
ITEM = PARTS * STEP  # elements of a row
# Microseconds, by counting instructions and bytes: of an item's products, of its part of x on the way from L2, and of
# adding a slice.
ITEM_US, X_ITEM_US, SLICE_US = 0.45, 0.35, 0.1


def tokens_for(num_rows: int) -> int | None:
    """The variant for so many rows, if one is."""
    return next((tokens for tokens in TOKENS if 1 < num_rows <= tokens), None)


def supports(device: CudaDevice, format: PackedFormat, num_rows: int, in_features: int, *, normed: bool) -> bool:
    """Whether the kernel multiplies so many rows of so many elements, k in one piece."""
    tokens = tokens_for(num_rows)
    return (
        tokens is not None
        and _takes(device, format, in_features)
        and shared_bytes(format, tokens, in_features, MIN_STAGES, normed=normed) <= device.max_shared_bytes
    )


def count_slices(device: CudaDevice, format: PackedFormat, features: int, in_features: int) -> int | None:
    """Slices of k of a product without norm or gate where x is too wide for one; None where one will do or none can.

    Fewer rows have the same ones, so that no sum depends on their number. x, which each block reads from L2, is as much
    as the weights there: 16 rows of 14,336 elements 459 KB, a block's part of 4096 x 14336 in Q4_K 250 KB.
    """
    few, many = TOKENS
    if not _takes(device, format, in_features) or supports(device, format, few, in_features, normed=False):
        return None
    items, tiles = ceil_div(in_features, ITEM), ceil_div(features, TILE_ROWS)

    def fits(slices: int) -> bool:
        columns = ceil_div(items, slices) * ITEM
        return shared_bytes(format, many, columns, MIN_STAGES, normed=False) <= device.max_shared_bytes

    def cost(slices: int) -> float:
        of_tile = ceil_div(items, slices)
        rounds = ceil_div(tiles, max(device.multiprocessors // slices, 1))
        return of_tile * (X_ITEM_US + rounds * ITEM_US) + slices * SLICE_US

    fitting = [slices for slices in range(2, 1 + min(MAX_SLICES, items)) if fits(slices)]
    return min(fitting, key=cost, default=None)


def _takes(device: CudaDevice, format: PackedFormat, in_features: int) -> bool:
    """Whether rows of the weight are as TMA needs them."""
    spans = ceil_div(in_features, format.span)
    return (
        SM90_BLOCK_ROWS.supports(device.arch)
        and spans * format.header_words * WORD_BYTES % COPY_BYTES == 0
        and spans * format.span * format.lane_words // 8 % SWIZZLE_BYTES == 0
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
    beside = PARTS * tokens * (1 + SUMS_STRIDE) * float32.itemsize + 2 * (MAX_ROWS_STAGES + 1) * BARRIER_BYTES
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


def launch_slices(
    device: CudaDevice, operands: RowsOperands, dtype: str, out_dtype: str, slices: int, sums: int, *, accumulates: bool
) -> None:
    """Submit the product with k cut into slices as `count_slices` has said; float32 `sums` [slices, M, N] are room."""
    sliced = operands._replace(bias=None, out=sums, out_stride=operands.part.shape[0])
    launch(device, sliced, dtype, C_TYPE_NAMES[float32], gated=False, accumulates=False, slices=slices)
    launch_add_slices(device, operands, slices, sums, dtype, out_dtype, accumulates=accumulates)


def launch(
    device: CudaDevice,
    operands: RowsOperands,
    dtype: str,
    out_dtype: str,
    *,
    gated: bool,
    accumulates: bool,
    slices: int = 1,
    followed: bool = False,
    follows: bool = False,
) -> None:
    """Submit the product; `supports` has said that it can.

    It may be followed by products of the same rows for other columns, each of which `follows` and waits for nothing in
    front of them.
    """
    x, norm, part, bias, out, out_stride, eps = operands
    assert isinstance(part.format, PackedFormat)
    features, in_features = part.shape
    tokens, normed = tokens_for(x.shape[0]), norm is not None
    assert tokens is not None
    columns = ceil_div(ceil_div(in_features, ITEM), slices) * ITEM  # of a block, at most
    stages = count_stages(part.format, tokens, columns, device.max_shared_bytes, normed=normed)
    grid = min(device.multiprocessors // slices, ceil_div(features, TILE_ROWS)) * slices
    nbytes = shared_bytes(part.format, tokens, columns, stages, normed=normed)
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
        slices=slices,
        eps=eps,
        accumulate=accumulates,
        gated=gated,
        followed=followed,
        follows=follows,
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
