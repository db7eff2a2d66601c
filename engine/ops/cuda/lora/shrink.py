"""The product with A, in front of the base's product or beside a norm."""

from __future__ import annotations

from functools import lru_cache

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.formats import AdapterRows, LoraStack
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.cuda.lora.any_width import launch_shrink_any
from tessera.engine.ops.cuda.lora.groups import num_tiles
from tessera.engine.ops.cuda.lora.kernels import (
    LORA_RANKS,
    LORA_SHRINK,
    LORA_SHRINK_NORM,
    LORA_SHRINK_WARPS,
    LORA_SLICE,
    LoraShrinkNormParams,
    LoraShrinkParams,
)
from tessera.engine.ops.cuda.lora.shapes import fits_tensor_cores
from tessera.engine.ops.cuda.types import (
    CHUNK,
    MAX_CACHED_CONFIGS,
    NORM_CHUNKS,
    WARP_SIZE,
    aligned,
    ceil_div,
    cuda_type,
    rmsnorm_config,
)
from tessera.engine.ops.linear_interface import RMSNorm
from tessera.engine.tensor import Tensor, bfloat16

WHOLE_BLOCKS = 4  # for each multiprocessor: as many that take the whole width each are enough


def launch_shrink(device: CudaDevice, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
    """x A^T, for `launch_expand` of the same tensors. In front of the product, whose kernel then fetches its weights
    meanwhile."""
    if fits_tensor_cores(x, stack, out):
        _launch_shrink(device, x, stack, rows)
    else:
        launch_shrink_any(device, x, stack, rows)


def launch_shrink_norm(
    device: CudaDevice, x: Tensor, norm: RMSNorm, stack: LoraStack, rows: AdapterRows, out: Tensor
) -> bool:
    """The norm of x into its scratch, and of that `launch_shrink`; False, and nothing done, where no kernel does both.

    `launch_expand` is told so, as the sums lack what the norm divides by.
    """
    num_rows, width = x.shape
    row_threads, threads = rmsnorm_config(num_rows, width).block[0], LORA_SHRINK_WARPS * WARP_SIZE
    whole = row_threads <= threads and width <= row_threads * CHUNK * NORM_CHUNKS
    fits = x.dtype == bfloat16 and whole and fits_tensor_cores(x, stack, out) and aligned(16, norm.weight, norm.scratch)
    if not choices.FUSES_NORMS or not fits:
        return False
    tiles, blocks, slices = shrink_config_of(device, x, stack).grid
    num_slots, parts, max_rank, _ = stack.a.shape
    if slices != num_slices(width) or inverses_of(stack, num_rows, slices) is None:
        return False
    params = LoraShrinkNormParams(
        x=x,
        gains=norm.weight,
        a=stack.a,
        factors=stack.factors,
        ranks=stack.selection.ranks,
        groups=rows.groups,
        normed=norm.scratch,
        inverses=inverses_of(stack, num_rows, slices),
        shrunk=stack.selection.shrunk,
        num_rows=num_rows,
        num_tiles=tiles,
        num_slots=num_slots,
        width=width,
        parts=parts,
        max_rank=max_rank,
        row_threads=row_threads,
        eps=norm.eps,
    )
    norms = ceil_div(ceil_div(num_rows, threads // row_threads), blocks * slices)
    config = LaunchConfig((tiles + norms, blocks, slices), (threads, 1, 1))
    device.launch(LORA_SHRINK_NORM, (cuda_type(x.dtype),), config, params)
    return True


def inverses_of(stack: LoraStack, num_rows: int, slices: int) -> Tensor | None:
    """Room behind the sums for a number of each row; None where there is none."""
    _, parts, max_rank, _ = stack.a.shape
    begin = num_rows * parts * max_rank * slices
    shrunk = stack.selection.shrunk
    return shrunk[begin : begin + num_rows] if begin + num_rows <= shrunk.size else None


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


def shrink_config_of(device: CudaDevice, x: Tensor, stack: LoraStack) -> LaunchConfig:
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
        factors=stack.factors,
        ranks=stack.selection.ranks,
        groups=rows.groups,
        shrunk=stack.selection.shrunk,
        num_rows=num_rows,
        num_slots=num_slots,
        width=width,
        parts=parts,
        max_rank=max_rank,
    )
    device.launch(LORA_SHRINK, (cuda_type(x.dtype),), shrink_config_of(device, x, stack), params)
