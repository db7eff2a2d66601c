"""Rows grouped by the slot of their adapter."""

from __future__ import annotations

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.formats import AdapterRows
from tessera.engine.ops.cuda.lora.kernels import GROUP_ROWS, LORA_ROWS, LORA_SLOTS, GroupRowsParams
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div

TILE_INTS = 3  # slot, first place, number of rows
LEAST_GROUP_THREADS = 256


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
