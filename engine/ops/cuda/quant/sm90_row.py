"""The product of one row by a weight in quantised blocks from sm_90 on: plans of `sm90_block_row_kernel`.

The row is in fixed point, as in `quant.product`; the order of its sums depends on in_features alone.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutOut, TensorMap
from tessera.engine.cuda.tensor_map import SWIZZLE_BYTES, lines_map, words_map
from tessera.engine.formats import KERNEL_FORMATS, PackedFormat, WeightPart
from tessera.engine.ops.cuda.neighbours import asked_bytes, asks_half
from tessera.engine.ops.cuda.quant.fixed_row import WORD_BYTES, has_integers, row_bytes
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, WARP_SIZE, ceil_div
from tessera.engine.tensor import Tensor, float32


class Sm90BlockRowParams(NamedTuple):
    x: InT
    norm: InT
    codes_map: TensorMap
    headers_map: TensorMap
    bias: InT
    out: OutOut
    out_features: Int32
    in_features: Int32
    stages: Int32
    eps: Float32
    accumulate: Int32
    gated: Int32
    begins_next: Int32
    follows: Int32


SM90_BLOCK_ROW = KernelSpec(
    file="quant/sm90_block_row.cu",
    name="sm90_block_row_kernel",
    template=("T", "Out", "F"),
    params=Sm90BlockRowParams,
    min_arch=90,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_BLOCK_ROW,)

ROW_WARPS = Constant(16, "of a block; they share k")
MAX_ROW_STAGES = Constant(8, "of the ring")
ROW_SHARED_BYTES = Constant(9600, "beside the ring and the row")
declare_header(
    "sm90_block_row",
    __name__,
    {"ROW_WARPS": ROW_WARPS, "MAX_ROW_STAGES": MAX_ROW_STAGES, "ROW_SHARED_BYTES": ROW_SHARED_BYTES},
    (Sm90BlockRowParams,),
)

THREADS = ROW_WARPS * WARP_SIZE
UNIT, TILE_ROWS = 8, 16  # of the weight
STEP = 128  # elements of each row that a warp takes at a time
COPY_BYTES = 16
RING_BYTES = 80 << 10  # wanted of the ring: more is in flight, less leaves room for the next kernel's
MIN_STAGES = 2
BLOCKS = 1  # of a multiprocessor
# Whether the next kernel starts beside the end of the one before. Then its ring fills while this one waits for that and
# for x, but where there is room for two of its blocks, these may come to share a multiprocessor. It gained nothing.
BEGINS_NEXT = False
MIN_BITS = 6  # of a code: below, `block_matmul_kernel` is what is chosen


def supports(device: CudaDevice, format: PackedFormat, in_features: int) -> bool:
    """Whether the kernel multiplies by rows of so many elements."""
    spans = ceil_div(in_features, format.span)
    return (
        SM90_BLOCK_ROW.supports(device.arch)
        and has_integers(format)
        and spans * format.header_words * WORD_BYTES % COPY_BYTES == 0
        and spans * format.span * format.lane_words // 8 % SWIZZLE_BYTES == 0
        and shared_bytes(format, in_features, MIN_STAGES) <= device.max_shared_bytes
    )


def is_chosen(device: CudaDevice, format: PackedFormat, in_features: int) -> bool:
    """Whether a single row is multiplied by this kernel."""
    return format.lane_words >= MIN_BITS and supports(device, format, in_features)


def _codes_bytes(format: PackedFormat) -> int:
    """Of a row of an item."""
    return ROW_WARPS * STEP * format.lane_words // 8


def _header_words(format: PackedFormat) -> int:
    """Of a row of an item."""
    return ROW_WARPS * STEP // format.span * format.header_words


def stage_bytes(format: PackedFormat) -> int:
    """Of an item: the codes and headers of each row of a tile."""
    return TILE_ROWS * (_codes_bytes(format) + _header_words(format) * WORD_BYTES)


def shared_bytes(format: PackedFormat, in_features: int, stages: int) -> int:
    """Dynamic shared memory of a block: the ring, the row in fixed point, and `RowShared`."""
    columns = ceil_div(in_features, ROW_WARPS * STEP) * ROW_WARPS * STEP
    return stages * stage_bytes(format) + row_bytes(format, columns) + ROW_SHARED_BYTES


def count_stages(format: PackedFormat, in_features: int, shared_limit: int) -> int:
    """Of the ring, up to RING_BYTES where there is room."""
    a_stage, wanted = stage_bytes(format), max(MIN_STAGES, RING_BYTES // stage_bytes(format))
    return min(MAX_ROW_STAGES, (shared_limit - shared_bytes(format, in_features, 0)) // a_stage, wanted)


class RowOperands(NamedTuple):
    """`out` is the address of the part's first column."""

    x: Tensor
    norm: Tensor | None
    part: WeightPart
    bias: Tensor | None
    out: int
    eps: float


def launch(
    device: CudaDevice,
    operands: RowOperands,
    dtype: str,
    out_dtype: str,
    *,
    gated: bool,
    accumulates: bool,
    followed: bool = False,
    follows: bool = False,
) -> None:
    """Submit the product; `supports` has said that it can. `followed` and `follows` as of `sm90_rows.launch`."""
    x, norm, part, bias, out, eps = operands
    assert isinstance(part.format, PackedFormat)
    features, in_features = part.shape
    stages = count_stages(part.format, in_features, device.max_shared_bytes)
    tiles = ceil_div(features, TILE_ROWS)
    grid = min(device.multiprocessors * BLOCKS, tiles)
    used = shared_bytes(part.format, in_features, stages)
    has_half = asks_half(features, in_features, device.multiprocessors, ends_half=accumulates)
    asked = asked_bytes(used, device.max_shared_bytes, has_half=has_half)
    config = LaunchConfig((grid, 1, 1), (THREADS, 1, 1), asked)
    params = Sm90BlockRowParams(
        x=x,
        norm=norm,
        codes_map=lines_map(part.tensors["codes"], UNIT, _codes_bytes(part.format) // SWIZZLE_BYTES),
        headers_map=words_map(part.tensors["headers"], UNIT, _header_words(part.format)),
        bias=bias,
        out=out,
        out_features=features,
        in_features=in_features,
        stages=stages,
        eps=eps,
        accumulate=accumulates,
        gated=gated,
        begins_next=BEGINS_NEXT and not followed,
        follows=follows,
    )
    device.launch(SM90_BLOCK_ROW, (dtype, out_dtype, part.format.kernel_type), config, params)


def kernels_of(format: PackedFormat, dtype: str) -> set[Instantiation]:
    """All that products by a weight of this format launch for elements of this C type."""
    outs = (dtype, C_TYPE_NAMES[float32])
    return {(SM90_BLOCK_ROW, (dtype, out, format.kernel_type)) for out in outs if has_integers(format)}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != C_TYPE_NAMES[float32]]
    formats = KERNEL_FORMATS.values()
    return [kernel for dtype in halves for format in formats for kernel in sorted(kernels_of(format, dtype), key=str)]
