"""The product with B, behind the base's product, and what follows it in the same kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.formats import AdapterRows, LoraStack
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.cuda.lora.any_width import launch_expand_any
from tessera.engine.ops.cuda.lora.groups import num_tiles
from tessera.engine.ops.cuda.lora.kernels import (
    LORA_EXPAND,
    LORA_EXPAND_WARPS,
    LORA_RANKS,
    LORA_ROWS,
    LoraExpandParams,
)
from tessera.engine.ops.cuda.lora.shapes import ExpandShape, expand_shape, fits_tensor_cores, part_starts
from tessera.engine.ops.cuda.lora.shrink import inverses_of, num_slices, shrink_config_of
from tessera.engine.ops.cuda.types import MAX_CACHED_CONFIGS, WARP_SIZE, aligned, ceil_div, cuda_type
from tessera.engine.tensor import Tensor


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
    if fits_tensor_cores(x, stack, out):
        _launch_expand(device, x, stack, rows, out, of_norm=of_norm, begun=begun)
    else:
        launch_expand_any(device, stack, rows, out)


def can_take_begun(begun: BegunAdapters | None, x: Tensor, stack: LoraStack, out: Tensor) -> bool:
    """Whether that is of this product."""
    if begun is None or begun.stack is not stack:
        return False
    return begun.x.pointer == x.pointer and begun.x.shape == x.shape and fits_tensor_cores(x, stack, out)


def begin_next(
    device: CudaDevice, stack: LoraStack, x: Tensor, next_stack: LoraStack | None, out: Tensor
) -> BegunAdapters | None:
    """The next product's shrink, for `launch_expand_silu_mul` to do where it has the activations; None where it
    cannot, or where there are so many rows that it does not pay."""
    num_rows, inner = out.shape
    _, parts, max_rank, _ = stack.a.shape
    if not choices.BEGINS_NEXT or next_stack is None or next_stack.selection is not stack.selection:
        return None
    own, later = shrink_config_of(device, x, stack).grid[2], shrink_config_of(device, out, next_stack).grid[2]
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
    if stack.part_rows != (inner, inner) or not fits_tensor_cores(x, stack, product) or not aligned(16, out):
        return False
    _launch_expand(device, x, stack, rows, product, activated=out, of_norm=of_norm, begins=begun)
    return True


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
    second, third = part_starts(stack)
    slices = shrink_config_of(device, x, stack).grid[2] if begun is None else begun.slices
    params = LoraExpandParams(
        shrunk=stack.selection.shrunk if begun is None else begun.sums,
        inverses=inverses_of(stack, num_rows, slices) if of_norm else None,
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
