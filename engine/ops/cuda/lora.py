"""Low-rank adapters beside a product: rows grouped by slot, the product with A, and that with B added to the output."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InInt, InT, Int32, OutFloat, OutInt, OutT
from tessera.engine.formats import AdapterRows, LoraStack
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div, cuda_type
from tessera.engine.tensor import Tensor


class GroupRowsParams(NamedTuple):
    slots: InInt
    groups: OutInt
    num_rows: Int32
    num_tiles: Int32
    num_slots: Int32


class LoraShrinkParams(NamedTuple):
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


class LoraExpandParams(NamedTuple):
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


GROUP_ROWS = KernelSpec(
    file="lora/lora.cu", name="group_rows_kernel", template=(), params=GroupRowsParams, overlaps=True, on_demand=True
)
LORA_SHRINK = KernelSpec(
    file="lora/lora.cu",
    name="lora_shrink_kernel",
    template=("T",),
    params=LoraShrinkParams,
    overlaps=True,
    on_demand=True,
)
LORA_EXPAND = KernelSpec(
    file="lora/lora.cu",
    name="lora_expand_kernel",
    template=("T",),
    params=LoraExpandParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (GROUP_ROWS, LORA_SHRINK, LORA_EXPAND)

LORA_SLOTS = Constant(1024, "most slots")
LORA_STAGED = Constant(1024, "slots of rows that are in shared memory at a time")
LORA_ROWS = Constant(16, "rows of a tile, at most")
LORA_PARTS = Constant(3, "parts of a weight, at most")
LORA_SHRINK_WARPS = Constant(8)
LORA_WARP_RANKS = Constant(2, "of a warp of lora_shrink_kernel")
LORA_RANKS = Constant(LORA_SHRINK_WARPS * LORA_WARP_RANKS, "of its block")
LORA_FEATURES = Constant(256, "of a block of lora_expand_kernel")
LORA_STAGE = Constant(32, "ranks that it has in shared memory at a time")
declare_header(
    "lora",
    __name__,
    {
        "LORA_SLOTS": LORA_SLOTS,
        "LORA_STAGED": LORA_STAGED,
        "LORA_ROWS": LORA_ROWS,
        "LORA_PARTS": LORA_PARTS,
        "LORA_SHRINK_WARPS": LORA_SHRINK_WARPS,
        "LORA_WARP_RANKS": LORA_WARP_RANKS,
        "LORA_RANKS": LORA_RANKS,
        "LORA_FEATURES": LORA_FEATURES,
        "LORA_STAGE": LORA_STAGE,
    },
    (GroupRowsParams, LoraShrinkParams, LoraExpandParams),
)

TILE_INTS = 3  # slot, first place, number of rows
LEAST_GROUP_THREADS = 256


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(GROUP_ROWS, ()), *((spec, (dtype,)) for dtype in dtypes for spec in (LORA_SHRINK, LORA_EXPAND))]


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


def launch_adapters(device: CudaDevice, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
    """out += factor * (x A^T) B^T in the rows that have an adapter."""
    num_rows, width = x.shape
    num_slots, parts, max_rank, _ = stack.a.shape
    features = out.shape[1]
    selection = stack.selection
    tiles = num_tiles(num_rows, num_slots)
    template = (cuda_type(x.dtype),)
    shrink = LoraShrinkParams(
        x=x,
        a=stack.a,
        factors=stack.factors,
        ranks=selection.ranks,
        groups=rows.groups,
        shrunk=selection.shrunk,
        num_rows=num_rows,
        width=width,
        parts=parts,
        max_rank=max_rank,
    )
    grid = (tiles, parts, ceil_div(max_rank, LORA_RANKS))
    device.launch(LORA_SHRINK, template, LaunchConfig(grid, (LORA_SHRINK_WARPS * WARP_SIZE, 1, 1)), shrink)
    starts = [sum(stack.part_rows[:part]) if part < parts else features for part in (1, 2)]
    expand = LoraExpandParams(
        shrunk=selection.shrunk,
        b=stack.b,
        ranks=selection.ranks,
        groups=rows.groups,
        out=out,
        num_rows=num_rows,
        features=features,
        parts=parts,
        max_rank=max_rank,
        second=starts[0],
        third=starts[1],
    )
    grid = (tiles, ceil_div(features, LORA_FEATURES), 1)
    device.launch(LORA_EXPAND, template, LaunchConfig(grid, (LORA_FEATURES, 1, 1)), expand)
