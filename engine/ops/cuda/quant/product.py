"""The product of a few rows by a weight in quantised blocks: which variant of `block_matmul_kernel` runs.

Of several rows each one's result depends neither on the others nor on their number: every sum runs over the same eight
interleaved parts of k in the same order. A single row is multiplied in fixed point where the weight's values are
integers (see `cuda_src/include/quant/block_row.cuh`), and differs from the same row among others in its last bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, InUint, OutOut
from tessera.engine.formats import KERNEL_FORMATS, LinearWeight, PackedFormat, WeightPart
from tessera.engine.ops.cuda.linear.sm90 import MULTIPLE
from tessera.engine.ops.cuda.neighbours import RESERVED_BYTES, asked_bytes, asks_half, most_bytes
from tessera.engine.ops.cuda.quant import slices as sliced
from tessera.engine.ops.cuda.quant import sm90_fragments, sm90_product, sm90_row, sm90_rows, turn
from tessera.engine.ops.cuda.quant.fixed_row import has_integers, row_bytes
from tessera.engine.ops.cuda.quant.operands import Sm90Operands
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, HALF_BYTES, WARP_SIZE, aligned, ceil_div, cuda_type
from tessera.engine.tensor import Tensor, bfloat16, float32


class BlockMatmulParams(NamedTuple):
    x: InT
    norm: InT
    codes: InUint
    headers: InUint
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    eps: Float32
    accumulate: Int32
    gated: Int32
    followed: Int32
    follows: Int32


BLOCK_MATMUL = KernelSpec(
    file="quant/block_matmul.cu",
    name="block_matmul_kernel",
    template=("T", "Out", "F", "TOKENS", "UNITS", "STAGES"),
    params=BlockMatmulParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (BLOCK_MATMUL,)
declare_header("block_matmul", __name__, params=(BlockMatmulParams,))

WARPS = 8  # of a block, as decode_product.cuh has them
THREADS = WARPS * WARP_SIZE
UNIT = 8  # rows of the weight that one tensor-core instruction takes
ROW_SUM_LANES = 4  # of a warp that have sums of a single row
STEP = 128  # elements of each row that a warp takes at a time
VECTOR_BYTES = 16
STEP_VECTORS = STEP * HALF_BYTES // VECTOR_BYTES
SUM_BYTES = 8  # of two sums of a warp
BLOCK_RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, by the driver, for each block
MAX_RESIDENT_FEATURES = 32768  # of the one row that a block keeps in shared memory


@dataclass(frozen=True)
class BlockTile:
    """A variant of the kernel: the most rows of x, units of 8 weight rows at a time, stages of the ring.

    `blocks` share a multiprocessor, where its shared memory has room for them.
    """

    tokens: int
    units: int
    stages: int
    blocks: int = 1

    def template(self, dtype: str, out_dtype: str, format: PackedFormat) -> tuple[str, ...]:
        return (dtype, out_dtype, format.kernel_type, str(self.tokens), str(self.units), str(self.stages))

    def shared_bytes(self, format: PackedFormat, in_features: int, *, normed: bool) -> int:
        """Dynamic shared memory of a block; a single row of x stays in it, and so does the norm of any, unless the row
        is in fixed point."""
        resident = self.tokens == 1
        groups = ceil_div(self.tokens, 8)
        of_tokens = 0 if resident else groups * STEP_VECTORS // 4 * VECTOR_BYTES
        of_unit = (format.lane_words + 1) * 4
        ring = self.stages * THREADS * (of_tokens + self.units * of_unit)
        sums = WARPS * self.units * groups * (ROW_SUM_LANES if resident else WARP_SIZE) * SUM_BYTES
        columns = ceil_div(in_features, STEP * WARPS) * WARPS * STEP
        if resident and has_integers(format):
            return ring + sums + row_bytes(format, columns)
        return ring + sums + (2 if resident else int(normed)) * columns * HALF_BYTES

    def fits(self, format: PackedFormat, in_features: int, limit: int, *, normed: bool) -> bool:
        """Whether a block has this much shared memory, with the sums of squares of each warp's rows."""
        needed = self.shared_bytes(format, in_features, normed=normed) + WARPS * self.tokens * float32.itemsize
        return self.blocks * (needed + BLOCK_RESERVED_BYTES) <= limit + BLOCK_RESERVED_BYTES

    def leaves_room(self, format: PackedFormat, in_features: int, limit: int, *, normed: bool) -> bool:
        """Whether a long ring and blocks of a single row's products before and behind it fit a multiprocessor."""
        used = self.shared_bytes(format, in_features, normed=normed)
        room = most_bytes(limit, has_half=not normed)
        shares = self.blocks * (used + RESERVED_BYTES) <= room + RESERVED_BYTES
        return shares and self.stages >= LONG_STAGES and (normed or self.blocks == 1)


TILES: dict[int, tuple[BlockTile, ...]] = {
    1: (BlockTile(1, 4, 3, 2), BlockTile(1, 4, 4), BlockTile(1, 2, 4, 2), BlockTile(1, 2, 2)),
    8: (BlockTile(8, 4, 3, 2), BlockTile(8, 4, 3), BlockTile(8, 2, 4, 2), BlockTile(8, 2, 2)),
    16: (BlockTile(16, 4, 2, 2), BlockTile(16, 4, 3), BlockTile(16, 2, 3, 2), BlockTile(16, 2, 2)),
    32: (BlockTile(32, 4, 2), BlockTile(32, 2, 2)),
}
LONG_STAGES = 4
MAX_ROWS_TMA = 16  # up to here the weight comes by TMA from sm_90 on, where the kernels that do so have room for x
MIN_ROWS_SM90 = 17  # from here on sm_90a multiplies by wgmma
MAX_ROWS_SM90 = 512  # more take longer than a dequantised copy of the weight
MAX_ROWS = 64  # by several launches; more are multiplied by dequantised weights
MOST_DEQUANTISED = 1 << 28  # elements; of a larger weight, a table of embeddings, no dequantised copy is made


class BlockProblem(NamedTuple):
    """What the choice of a variant depends on; `dtype` is a C name. No product follows one that gives `logits`."""

    num_rows: int
    in_features: int
    dtype: str
    normed: bool
    logits: bool


def choose_tile(problem: BlockProblem, format: PackedFormat, shared_limit: int) -> BlockTile | None:
    """The variant that takes most rows at once, None where no variant fits.

    Several rows are normalised in a dtype with the range of a float alone, as by `matmul_decode_kernel`. Of a single
    row the rings of neighbours lie beside each other, where there is such a variant.
    """
    if problem.normed and problem.num_rows > 1 and problem.dtype != C_TYPE_NAMES[bfloat16]:
        return None
    wanted = next((tokens for tokens in TILES if tokens >= problem.num_rows), max(TILES))
    if wanted == 1 and problem.in_features > MAX_RESIDENT_FEATURES:
        wanted = 8
    if wanted == 1 and not problem.logits:
        for tile in TILES.get(1, ()):
            if tile.leaves_room(format, problem.in_features, shared_limit, normed=problem.normed):
                return tile
    for tokens in sorted((tokens for tokens in TILES if 1 < tokens <= wanted or tokens == wanted), reverse=True):
        for tile in TILES[tokens]:
            if tile.fits(format, problem.in_features, shared_limit, normed=problem.normed):
                return tile
    return None


def turned_bytes(weights: Iterable[LinearWeight], device: CudaDevice) -> int:
    """Of the room in which products by these weights may turn rows of x."""
    if not sm90_fragments.SM90_BLOCK_FRAGMENTS.supports(device.arch):
        return 0
    widths = (
        weight.shape[1] for weight in weights if any(isinstance(part.format, PackedFormat) for part in weight.parts)
    )
    return turn.nbytes_for(MAX_ROWS_SM90, max(widths, default=0))


def takes_any_rows(weight: LinearWeight) -> bool:
    """Whether products of many rows are made of products of few, too."""
    packed = all(isinstance(part.format, PackedFormat) for part in weight.parts)
    return packed and weight.shape[0] * weight.shape[1] > MOST_DEQUANTISED


def is_dequantised(device: CudaDevice, weight: LinearWeight, num_rows: int) -> bool:
    """Whether products of so many rows are of the dequantised weight, whatever stands around them."""
    if any(not isinstance(part.format, PackedFormat) for part in weight.parts):
        return True
    most = MAX_ROWS_SM90 if sm90_product.SM90_BLOCK_MATMUL.supports(device.arch) else MAX_ROWS
    return num_rows > most and not takes_any_rows(weight)


class BlockOperands(NamedTuple):
    """As LinearOperands; `weight` has packed parts alone, `room` is for rows of x that are turned, if they may be.

    `next_weight`: which alone the gated result is multiplied by. `is_turned`: x is what such a product has turned.
    """

    x: Tensor
    weight: LinearWeight
    out: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    room: Tensor | None = None
    next_weight: LinearWeight | None = None
    is_turned: bool = False


class Stored(Enum):
    """The order of a product's columns."""

    AS_THEY_ARE = auto()
    TURNED = auto()  # for a product that is told so


class Around(NamedTuple):
    """What a launch does beside its product, and whether those of other parts are `followed` or `follows` them."""

    gated: bool
    accumulates: bool
    followed: bool
    follows: bool


def launch_block_product(
    device: CudaDevice, operands: BlockOperands, *, gated: bool = False, accumulates: bool = False
) -> Stored | None:
    """Submit a product, perhaps with the norm before it and the gate after it; None, and nothing done, where none can.

    Parts of several formats take a launch each, and so do rows beyond those of a variant.
    """
    many = _launch_many_rows(device, operands, gated=gated, accumulates=accumulates)
    if many is not None or operands.is_turned:
        return many
    few = _launch_few_rows(device, operands, gated=gated, accumulates=accumulates)
    return Stored.AS_THEY_ARE if few else None


def _launch_few_rows(device: CudaDevice, operands: BlockOperands, *, gated: bool, accumulates: bool) -> bool:
    """The same without wgmma; False, and nothing done, where none can."""
    x, weight, out, norm = operands[:4]
    num_rows, in_features = x.shape
    formats = [part.format for part in weight.parts if isinstance(part.format, PackedFormat)]
    if num_rows > MAX_ROWS and not takes_any_rows(weight):
        return False
    if norm is not None and num_rows >= MIN_ROWS_SM90 and sm90_product.SM90_BLOCK_MATMUL.supports(device.arch):
        return False
    if x.dtype.itemsize != HALF_BYTES or len(formats) < len(weight.parts):
        return False
    if gated and (len(formats) > 1 or weight.bias is not None):
        return False
    addresses = x.pointer | (0 if norm is None else norm.pointer)
    odd = any(part.shape[0] % (4 if gated else 2) for part in weight.parts)
    if addresses % VECTOR_BYTES or out.pointer % (2 * out.dtype.itemsize) or odd:
        return False
    problem = BlockProblem(num_rows, in_features, cuda_type(x.dtype), norm is not None, out.dtype == float32)
    tiles = [choose_tile(problem, format, device.max_shared_bytes) for format in formats]
    if None in tiles:
        return False
    starts = itertools.accumulate((part.shape[0] for part in weight.parts), initial=0)
    side_by_side = len(formats) > 1 and (
        num_rows == 1
        or all(sm90_rows.supports(device, format, num_rows, in_features, normed=norm is not None) for format in formats)
    )
    for part, tile, start in zip(weight.parts, tiles, starts, strict=False):
        assert tile is not None
        for first in range(0, num_rows, tile.tokens):
            around = Around(gated, accumulates, side_by_side and start == 0, side_by_side and start > 0)
            _launch(device, operands, part, tile, start, slice(first, min(first + tile.tokens, num_rows)), around)
    return True


def takes_turned(device: CudaDevice, weight: LinearWeight, num_rows: int, dtype: np.dtype[Any]) -> bool:
    """Whether products of so many rows by a weight are of rows that the product before may store turned."""
    if not MIN_ROWS_SM90 <= num_rows <= MAX_ROWS_SM90 or weight.shape[1] % turn.STEP or weight.order is not None:
        return False
    adapted = weight.adapters is not None and weight.adapters.selection.rows is not None
    by_fragments = sm90_product.KERNELS[0] is sm90_fragments.SM90_BLOCK_FRAGMENTS
    if adapted or not by_fragments or dtype.itemsize != HALF_BYTES:
        return False
    return all(
        isinstance(part.format, PackedFormat)
        and part.shape[0] % MULTIPLE == 0
        and sm90_fragments.can_take_turned(device, part.format)
        for part in weight.parts
    )


def _room_of(x: Tensor, room: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where x may be turned, and what is left for the sums of slices."""
    turned = None if room is None else turn.place_of(x, room)
    return turned, room if room is None or turned is None else room[turned.nbytes :]


def _launch_many_rows(device: CudaDevice, operands: BlockOperands, *, gated: bool, accumulates: bool) -> Stored | None:
    """The same by wgmma, part by part; None, and nothing done, where it cannot or would be slower.

    A norm is taken where the rows are turned for all parts.
    """
    x, weight, out, norm, eps, room, next_weight, is_turned = operands
    num_rows = x.shape[0]
    if num_rows < MIN_ROWS_SM90 or (num_rows > MAX_ROWS_SM90 and not takes_any_rows(weight)):
        return None
    if x.dtype.itemsize != HALF_BYTES or (gated and (len(weight.parts) > 1 or weight.bias is not None)):
        return None
    starts = list(itertools.accumulate((part.shape[0] for part in weight.parts), initial=0))[:-1]
    turned, sums = (x, room) if is_turned else _room_of(x, room)
    if norm is not None and (turned is None or not aligned(VECTOR_BYTES, x, norm)):
        return None
    turns = False
    if gated and next_weight is not None and aligned(VECTOR_BYTES, out):
        turns = takes_turned(device, next_weight, num_rows, x.dtype)
    products = [
        Sm90Operands(
            x=x,
            part=part,
            bias=None if weight.bias is None else weight.bias[start : start + part.shape[0]],
            out=out.pointer + start * out.dtype.itemsize,
            out_dtype=cuda_type(out.dtype),
            out_itemsize=out.dtype.itemsize,
            out_stride=out.shape[1],
            turned=turned,
            comes_turned=norm is not None or is_turned,
            turns=turns,
            sums=sums,
        )
        for part, start in zip(weight.parts, starts, strict=True)
    ]
    plans = [sm90_product.plan_of(device, product, gated=gated, accumulates=accumulates) for product in products]
    if None in plans:
        return None
    are_turned = [isinstance(plan, sm90_fragments.FragmentsPlan) and plan.turned for plan in plans]
    if products[0].comes_turned and not all(are_turned):
        return None
    if norm is not None:
        assert turned is not None
        turn.launch_norm(device, x, norm, eps, turned)
    elif any(are_turned) and not is_turned:
        assert turned is not None
        turn.launch(device, x, turned)
    for product, plan in zip(products, plans, strict=True):
        assert plan is not None
        sm90_product.launch(device, product, plan, gated=gated, accumulates=accumulates)
    stores_turned = turns and isinstance(plans[0], sm90_fragments.FragmentsPlan)
    return Stored.TURNED if stores_turned else Stored.AS_THEY_ARE


def _launch(
    device: CudaDevice,
    operands: BlockOperands,
    part: WeightPart,
    tile: BlockTile,
    start: int,
    rows: slice,
    around: Around,
) -> None:
    """Some rows times the features of a part, which begin at `start`."""
    x, weight, out, norm, eps, room = operands[:6]
    gated, accumulates, followed, follows = around
    assert isinstance(part.format, PackedFormat)
    features, in_features = part.shape
    place = out.pointer + (rows.start * out.shape[1] + start) * out.dtype.itemsize
    bias = None if weight.bias is None else weight.bias[start : start + features]
    types = (cuda_type(x.dtype), cuda_type(out.dtype))
    if x.shape[0] <= MAX_ROWS_TMA and rows == slice(0, x.shape[0]):
        if x.shape[0] == 1 and sm90_row.is_chosen(device, part.format, in_features):
            row = sm90_row.RowOperands(x, norm, part, bias, place, eps)
            sm90_row.launch(
                device, row, *types, gated=gated, accumulates=accumulates, followed=followed, follows=follows
            )
            return
        few = sm90_rows.RowsOperands(x, norm, part, bias, place, out.shape[1], eps)
        if sm90_rows.supports(device, part.format, x.shape[0], in_features, normed=norm is not None):
            sm90_rows.launch(
                device, few, *types, gated=gated, accumulates=accumulates, followed=followed, follows=follows
            )
            return
        slices = None if gated or norm is not None or x.shape[0] == 1 else _slices_of(device, part)
        if slices is not None and (sums := sliced.place_of(room, slices, MAX_ROWS_TMA, features)) is not None:
            sm90_rows.launch_slices(device, few, *types, slices, sums, accumulates=accumulates)
            return
    units = ceil_div(features // 2 if gated else features, UNIT)
    # A second block of each multiprocessor pays where all have tiles to do.
    blocks = tile.blocks if units >= 0.7 * tile.blocks * device.multiprocessors * tile.units else 1
    shared_bytes = tile.shared_bytes(part.format, in_features, normed=norm is not None)
    if tile.tokens == blocks == 1:
        has_half = asks_half(*part.shape, device.multiprocessors, ends_half=accumulates)
        shared_bytes = asked_bytes(shared_bytes, device.max_shared_bytes, has_half=has_half)
    config = LaunchConfig((min(device.multiprocessors * blocks, units), 1, 1), (THREADS, 1, 1), shared_bytes)
    params = BlockMatmulParams(
        x=x[rows],
        norm=norm,
        codes=part.tensors["codes"],
        headers=part.tensors["headers"],
        bias=bias,
        out=place,
        num_rows=rows.stop - rows.start,
        out_features=features,
        in_features=in_features,
        out_stride=out.shape[1],
        eps=eps,
        accumulate=accumulates,
        gated=gated,
        followed=followed,
        follows=follows,
    )
    device.launch(BLOCK_MATMUL, tile.template(*types, part.format), config, params)


def _slices_of(device: CudaDevice, part: WeightPart) -> int | None:
    assert isinstance(part.format, PackedFormat)
    return sm90_rows.count_slices(device, part.format, *part.shape)


def kernels_of(weight: LinearWeight, dtype: str, device: CudaDevice) -> set[Instantiation]:
    """All that products by a weight launch for elements of this C type."""
    if dtype == C_TYPE_NAMES[float32]:
        return set()
    outs = (dtype, C_TYPE_NAMES[float32])
    problems = [
        BlockProblem(rows, weight.shape[1], dtype, normed, logits)
        for rows, normed, logits in itertools.product(TILES, (False, True), (False, True))
    ]
    formats = {part.format for part in weight.parts if isinstance(part.format, PackedFormat)}
    kernels: set[Instantiation] = {
        (BLOCK_MATMUL, tile.template(dtype, outs[problem.logits], format))
        for format in formats
        for problem in problems
        if (tile := choose_tile(problem, format, device.max_shared_bytes)) is not None
    }
    if sm90_row.SM90_BLOCK_ROW.supports(device.arch):
        for format in formats:
            kernels |= sm90_row.kernels_of(format, dtype) | sm90_rows.kernels_of(format, dtype)
        kernels |= set(sliced.instantiations((dtype,)))
    if sm90_product.SM90_BLOCK_MATMUL.supports(device.arch):
        for format in formats:
            kernels |= sm90_product.kernels_of(format, dtype)
        kernels |= set(turn.instantiations((dtype,)))
    return kernels


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != C_TYPE_NAMES[float32]]
    kernels: dict[Instantiation, None] = {
        (BLOCK_MATMUL, tile.template(dtype, out, format)): None  # tiles may differ in their number of blocks alone
        for dtype in halves
        for format in KERNEL_FORMATS.values()
        for tiles in TILES.values()
        for tile in tiles
        for out in (dtype, C_TYPE_NAMES[float32])
    }
    return list(kernels)
