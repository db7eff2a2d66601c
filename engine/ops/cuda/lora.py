"""Low-rank adapters beside a product: rows grouped by slot, the product with A, and that with B added to the output.

Products of 2-byte elements in whole segments are on tensor cores. There the product with A may be divided into slices
of the width, which that with B adds in order: a row's sums have the same order and bits whether it is or not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutFloat, OutInt, OutT
from tessera.engine.formats import AdapterRows, LoraStack
from tessera.engine.ops.cuda.types import (
    CHUNK,
    HALF_BYTES,
    MAX_CACHED_CONFIGS,
    NORM_CHUNKS,
    SEGMENT,
    WARP_SIZE,
    aligned,
    ceil_div,
    cuda_type,
    rmsnorm_config,
)
from tessera.engine.ops.linear_interface import RMSNorm
from tessera.engine.tensor import Tensor, bfloat16


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
    b: InT
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
    features: Int32
    parts: Int32
    max_rank: Int32
    row_threads: Int32
    fetches_b: Int32
    eps: Float32


class LoraShrinkParams(NamedTuple):
    x: InT
    a: InT
    b: InT
    factors: InFloat
    ranks: InInt
    groups: InInt
    shrunk: OutFloat
    num_rows: Int32
    num_slots: Int32
    width: Int32
    features: Int32
    parts: Int32
    max_rank: Int32
    fetches_b: Int32


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
SPECS = (GROUP_ROWS, LORA_SHRINK, LORA_SHRINK_NORM, LORA_EXPAND, LORA_SHRINK_ANY, LORA_EXPAND_ANY)

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


class BegunAdapters(NamedTuple):
    """A product with A that the kernel before has done.

    Attributes:
        x: its input, which is still to be multiplied by the weight.
        sums: [slices, M, R] float32.
    """

    stack: LoraStack
    x: Tensor
    sums: Tensor
    slices: int


class ExpandShape(NamedTuple):
    """Template arguments of `lora_expand_kernel`.

    Attributes:
        groups: of 32 features that a warp takes; halves are of both parts where the activation follows.
        steps: of 16 ranks at a time.
        most_ranks: that it can do; with 16 it does no others.
    """

    groups: int
    steps: int
    most_ranks: int

    def template(self, dtype: str, gated: bool) -> tuple[str, ...]:
        return (dtype, *map(str, self), "true" if gated else "false")

    def features(self, gated: bool) -> int:
        """Of a block, in one part."""
        return LORA_EXPAND_WARPS * self.groups // (2 if gated else 1) * 4 * SEGMENT


EXPAND_SHAPES = (ExpandShape(4, 1, 16), ExpandShape(2, 2, 32), ExpandShape(2, 2, 256))


def expand_shape(max_rank: int) -> ExpandShape:
    if max_rank == EXPAND_SHAPES[0].most_ranks:
        return EXPAND_SHAPES[0]
    return next(shape for shape in EXPAND_SHAPES[1:] if max_rank <= shape.most_ranks)


# What `python -m tests.bench.lora --variants` compares.
FETCHES_B = True  # whether the product with A of few rows fetches B into L2
FUSES_NORMS = True  # whether a norm of few rows is beside the product with A
BEGINS_NEXT = True  # whether the activation of few rows is multiplied with the next product's A where it is made

WHOLE_BLOCKS = 4  # for each multiprocessor: as many that take the whole width each are enough

BFLOAT16 = cuda_type(bfloat16)
TILE_INTS = 3  # slot, first place, number of rows
LEAST_GROUP_THREADS = 256


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    pairs: list[Instantiation] = [(GROUP_ROWS, ())]
    for dtype in dtypes:
        pairs += [(spec, (dtype,)) for spec in (LORA_SHRINK_ANY, LORA_EXPAND_ANY)]
        if dtype != "float":
            pairs.append((LORA_SHRINK, (dtype,)))
            if dtype == BFLOAT16:
                pairs.append((LORA_SHRINK_NORM, (dtype,)))
            pairs += [(LORA_EXPAND, shape.template(dtype, gated)) for shape in EXPAND_SHAPES for gated in (False, True)]
    return pairs


def num_tiles(num_rows: int, num_slots: int) -> int:
    """Most tiles that so many rows make."""
    return min(num_rows, ceil_div(num_rows, LORA_ROWS) + num_slots)


def groups_size(num_rows: int, num_slots: int) -> int:
    """Elements of the groups of so many rows."""
    return num_rows + TILE_INTS * num_tiles(num_rows, num_slots)


def launch_group_rows(device: CudaDevice, rows: AdapterRows, num_slots: int) -> None:
    (num_rows,) = rows.slots.shape
    if num_slots > LORA_SLOTS:
        raise TesseraError(f"{num_slots} slots for adapters are more than the {LORA_SLOTS} that kernels sort")
    params = GroupRowsParams(
        slots=rows.slots,
        groups=rows.groups,
        num_rows=num_rows,
        num_tiles=num_tiles(num_rows, num_slots),
        num_slots=num_slots,
    )
    threads = max(ceil_div(num_slots, WARP_SIZE) * WARP_SIZE, LEAST_GROUP_THREADS)
    device.launch(GROUP_ROWS, (), LaunchConfig((1, 1, 1), (threads, 1, 1)), params)


def launch_shrink(device: CudaDevice, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
    """x A^T, for `launch_expand` of the same tensors. In front of the product, whose kernel then fetches its weights
    meanwhile."""
    if _fits_tensor_cores(x, stack, out):
        _launch_shrink(device, x, stack, rows)
    else:
        _launch_shrink_any(device, x, stack, rows)


def launch_shrink_norm(
    device: CudaDevice, x: Tensor, norm: RMSNorm, stack: LoraStack, rows: AdapterRows, out: Tensor
) -> bool:
    """The norm of x into its scratch, and of that `launch_shrink`; False, and nothing done, where no kernel does both.

    `launch_expand` is told so, as the sums lack what the norm divides by.
    """
    num_rows, width = x.shape
    row_threads, threads = rmsnorm_config(num_rows, width).block[0], LORA_SHRINK_WARPS * WARP_SIZE
    whole = row_threads <= threads and width <= row_threads * CHUNK * NORM_CHUNKS
    fits = (
        x.dtype == bfloat16 and whole and _fits_tensor_cores(x, stack, out) and aligned(16, norm.weight, norm.scratch)
    )
    if not FUSES_NORMS or not fits:
        return False
    tiles, blocks, slices = _shrink_config(device, x, stack).grid
    num_slots, parts, max_rank, _ = stack.a.shape
    if slices != num_slices(width) or _inverses(stack, num_rows, slices) is None:
        return False
    params = LoraShrinkNormParams(
        x=x,
        gains=norm.weight,
        a=stack.a,
        b=stack.b,
        factors=stack.factors,
        ranks=stack.selection.ranks,
        groups=rows.groups,
        normed=norm.scratch,
        inverses=_inverses(stack, num_rows, slices),
        shrunk=stack.selection.shrunk,
        num_rows=num_rows,
        num_tiles=tiles,
        num_slots=num_slots,
        width=width,
        features=stack.b.shape[1],
        parts=parts,
        max_rank=max_rank,
        row_threads=row_threads,
        fetches_b=int(FETCHES_B),
        eps=norm.eps,
    )
    norms = ceil_div(ceil_div(num_rows, threads // row_threads), blocks * slices)
    config = LaunchConfig((tiles + norms, blocks, slices), (threads, 1, 1))
    device.launch(LORA_SHRINK_NORM, (cuda_type(x.dtype),), config, params)
    return True


def _inverses(stack: LoraStack, num_rows: int, slices: int) -> Tensor | None:
    """Room behind the sums for a number of each row; None where there is none."""
    _, parts, max_rank, _ = stack.a.shape
    begin = num_rows * parts * max_rank * slices
    shrunk = stack.selection.shrunk
    return shrunk[begin : begin + num_rows] if begin + num_rows <= shrunk.size else None


def launch_expand(
    device: CudaDevice,
    x: Tensor,
    stack: LoraStack,
    rows: AdapterRows,
    out: Tensor,
    *,
    of_norm: bool = False,
    begun: BegunAdapters | None = None,
) -> None:
    """out += factor * (x A^T) B^T in the rows that have an adapter.

    `of_norm`: behind `launch_shrink_norm`; `begun`: instead of `launch_shrink`.
    """
    if _fits_tensor_cores(x, stack, out):
        _launch_expand(device, x, stack, rows, out, of_norm=of_norm, begun=begun)
    else:
        _launch_expand_any(device, stack, rows, out)


def can_take_begun(begun: BegunAdapters | None, x: Tensor, stack: LoraStack, out: Tensor) -> bool:
    """Whether that is of this product."""
    if begun is None or begun.stack is not stack:
        return False
    return begun.x.pointer == x.pointer and begun.x.shape == x.shape and _fits_tensor_cores(x, stack, out)


def begin_next(
    device: CudaDevice, stack: LoraStack, x: Tensor, next_stack: LoraStack | None, out: Tensor
) -> BegunAdapters | None:
    """The next product's shrink, for `launch_expand_silu_mul` to do where it has the activations; None where it
    cannot, or where there are so many rows that it does not pay."""
    num_rows, inner = out.shape
    _, parts, max_rank, _ = stack.a.shape
    if not BEGINS_NEXT or next_stack is None or next_stack.selection is not stack.selection:
        return None
    own, later = _shrink_config(device, x, stack).grid[2], _shrink_config(device, out, next_stack).grid[2]
    fits = next_stack.a.shape[1:] == (1, max_rank, inner) and max_rank == LORA_RANKS and aligned(16, next_stack.a)
    if not fits or (own, later) != (num_slices(x.shape[1]), num_slices(inner)):
        return None
    slices = ceil_div(inner, expand_shape(max_rank).features(gated=True))
    begin = num_rows * (parts * max_rank * own + 1)
    end = begin + slices * num_rows * max_rank
    shrunk = stack.selection.shrunk
    return BegunAdapters(next_stack, out, shrunk[begin:end], slices) if end <= shrunk.size else None


def launch_expand_silu_mul(
    device: CudaDevice,
    x: Tensor,
    stack: LoraStack,
    rows: AdapterRows,
    product: Tensor,
    out: Tensor,
    *,
    of_norm: bool = False,
    begun: BegunAdapters | None = None,
) -> bool:
    """The same with SiLU of the first half of the features times the second, and `begun` of that; False, and nothing
    done, where no kernel does that at once."""
    inner = out.shape[1]
    if stack.part_rows != (inner, inner) or not _fits_tensor_cores(x, stack, product) or not aligned(16, out):
        return False
    _launch_expand(device, x, stack, rows, product, activated=out, of_norm=of_norm, begins=begun)
    return True


def _fits_tensor_cores(x: Tensor, stack: LoraStack, out: Tensor) -> bool:
    """Whether all rows are whole segments of 2-byte elements."""
    widths = (x.shape[1], stack.a.shape[2], *stack.part_rows)
    whole = x.dtype.itemsize == HALF_BYTES and all(width % SEGMENT == 0 for width in widths)
    fits = stack.a.shape[2] <= EXPAND_SHAPES[-1].most_ranks and out.dtype == x.dtype
    return whole and fits and aligned(16, x, stack.a, stack.b, out)


def num_slices(width: int) -> int:
    """Slices of a product's width, whose sums are added in order."""
    return ceil_div(width, LORA_SLICE)


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def shrink_config(
    num_rows: int, num_slots: int, parts: int, max_rank: int, width: int, room: int, multiprocessors: int
) -> LaunchConfig:
    """A block for every slice of the width where few would take it whole, and where `room` floats hold their sums."""
    tiles, blocks, slices = num_tiles(num_rows, num_slots), parts * ceil_div(max_rank, LORA_RANKS), num_slices(width)
    few = tiles * blocks < WHOLE_BLOCKS * multiprocessors
    sliced = few and num_rows * parts * max_rank * slices <= room
    return LaunchConfig((tiles, blocks, slices if sliced else 1), (LORA_SHRINK_WARPS * WARP_SIZE, 1, 1))


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def expand_config(
    num_rows: int, num_slots: int, part_rows: tuple[int, ...], shape: ExpandShape, gated: bool
) -> LaunchConfig:
    """With `gated` a block has features of both parts, and there are tiles for rows without an adapter."""
    tiles, features = num_tiles(num_rows, num_slots), shape.features(gated)
    if gated:
        grid = (ceil_div(part_rows[0], features), tiles + ceil_div(num_rows, LORA_ROWS), 1)
    else:
        grid = (sum(ceil_div(count, features) for count in part_rows), tiles, 1)
    return LaunchConfig(grid, (LORA_EXPAND_WARPS * WARP_SIZE, 1, 1))


def _shrink_config(device: CudaDevice, x: Tensor, stack: LoraStack) -> LaunchConfig:
    num_rows, width = x.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    room = stack.selection.shrunk.size
    return shrink_config(num_rows, num_slots, parts, max_rank, width, room, device.multiprocessors)


def _launch_shrink(device: CudaDevice, x: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    num_rows, width = x.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    params = LoraShrinkParams(
        x=x,
        a=stack.a,
        b=stack.b,
        factors=stack.factors,
        ranks=stack.selection.ranks,
        groups=rows.groups,
        shrunk=stack.selection.shrunk,
        num_rows=num_rows,
        num_slots=num_slots,
        width=width,
        features=stack.b.shape[1],
        parts=parts,
        max_rank=max_rank,
        fetches_b=int(FETCHES_B),
    )
    device.launch(LORA_SHRINK, (cuda_type(x.dtype),), _shrink_config(device, x, stack), params)


def _launch_expand(
    device: CudaDevice,
    x: Tensor,
    stack: LoraStack,
    rows: AdapterRows,
    out: Tensor,
    *,
    activated: Tensor | None = None,
    of_norm: bool = False,
    begun: BegunAdapters | None = None,
    begins: BegunAdapters | None = None,
) -> None:
    num_rows, features = out.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    gated = activated is not None
    shape = expand_shape(max_rank)
    second, third = _part_starts(stack)
    slices = _shrink_config(device, x, stack).grid[2] if begun is None else begun.slices
    params = LoraExpandParams(
        shrunk=stack.selection.shrunk if begun is None else begun.sums,
        inverses=_inverses(stack, num_rows, slices) if of_norm else None,
        b=stack.b,
        factors=stack.factors,
        ranks=stack.selection.ranks,
        slots=rows.slots,
        groups=rows.groups,
        out=out,
        activated=activated,
        next_a=None if begins is None else begins.stack.a,
        next_factors=None if begins is None else begins.stack.factors,
        next_shrunk=None if begins is None else begins.sums,
        num_rows=num_rows,
        num_tiles=num_tiles(num_rows, num_slots),
        num_slots=num_slots,
        features=features,
        parts=parts,
        max_rank=max_rank,
        slices=slices,
        in_halves=int(begun is not None),
        second=second,
        third=third,
    )
    config = expand_config(num_rows, num_slots, stack.part_rows, shape, gated)
    device.launch(LORA_EXPAND, shape.template(cuda_type(out.dtype), gated), config, params)


def _launch_shrink_any(device: CudaDevice, x: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    num_rows, width = x.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    params = LoraShrinkAnyParams(
        x=x,
        a=stack.a,
        factors=stack.factors,
        ranks=stack.selection.ranks,
        groups=rows.groups,
        shrunk=stack.selection.shrunk,
        num_rows=num_rows,
        width=width,
        parts=parts,
        max_rank=max_rank,
    )
    grid = (num_tiles(num_rows, num_slots), parts, ceil_div(max_rank, LORA_RANKS))
    config = LaunchConfig(grid, (LORA_SHRINK_WARPS * WARP_SIZE, 1, 1))
    device.launch(LORA_SHRINK_ANY, (cuda_type(x.dtype),), config, params)


def _launch_expand_any(device: CudaDevice, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
    num_rows, features = out.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    second, third = _part_starts(stack)
    params = LoraExpandAnyParams(
        shrunk=stack.selection.shrunk,
        b=stack.b,
        ranks=stack.selection.ranks,
        groups=rows.groups,
        out=out,
        num_rows=num_rows,
        features=features,
        parts=parts,
        max_rank=max_rank,
        second=second,
        third=third,
    )
    grid = (num_tiles(num_rows, num_slots), ceil_div(features, LORA_FEATURES), 1)
    device.launch(LORA_EXPAND_ANY, (cuda_type(stack.b.dtype),), LaunchConfig(grid, (LORA_FEATURES, 1, 1)), params)


def _part_starts(stack: LoraStack) -> tuple[int, int]:
    """The first features of parts 1 and 2, the number of features where there is none."""
    second = stack.part_rows[0]
    return second, second + sum(stack.part_rows[1:2])
