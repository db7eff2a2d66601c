"""Products with adapters of elements and widths that tensor cores do not take."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.formats import AdapterRows, LoraStack
from tessera.engine.ops.cuda.lora.groups import num_tiles
from tessera.engine.ops.cuda.lora.kernels import (
    LORA_EXPAND_ANY,
    LORA_FEATURES,
    LORA_RANKS,
    LORA_SHRINK_ANY,
    LORA_SHRINK_WARPS,
    LoraExpandAnyParams,
    LoraShrinkAnyParams,
)
from tessera.engine.ops.cuda.lora.shapes import part_starts
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div, cuda_type
from tessera.engine.tensor import Tensor


def launch_shrink_any(device: CudaDevice, x: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
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


def launch_expand_any(device: CudaDevice, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
    num_rows, features = out.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    second, third = part_starts(stack)
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
