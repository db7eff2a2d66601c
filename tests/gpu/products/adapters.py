"""Adapters of low rank, and rows that take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.formats import AdapterRows, AdapterSelection, LoraStack
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import from_numpy
from tests.support.cases.op_cases import random_array

Array = np.ndarray[Any, Any]


def rows_of(ops: Ops, slots: Array, num_slots: int) -> AdapterRows:
    size = ops.row_groups_size(len(slots), num_slots)
    groups = from_numpy(np.full(size, -7, np.int32), ops.device) if size else None
    rows = AdapterRows(from_numpy(slots.astype(np.int32), ops.device), groups)
    ops.group_rows(rows, num_slots)
    return rows


def stack_of(
    ops: Ops,
    dtype: Any,
    columns: int,
    part_rows: tuple[int, ...],
    ranks: tuple[int, ...],
    max_rank: int,
    num_rows: int,
    room: int = 1,
) -> LoraStack:
    """The first part of slot 0 has no adapter; beyond a slot's rank all is 0, as slots are filled. `room`: for so many
    slices of the width."""
    count, parts = len(ranks), len(part_rows)
    a = random_array(11, (count, parts, max_rank, columns), dtype, 0.2)
    b = random_array(12, (count, sum(part_rows), max_rank), dtype, 0.2)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = 0
        b[slot, :, rank:] = 0
    factors = np.linspace(0.5, 2.0, count * parts, dtype=np.float32).reshape(count, parts)
    factors[0, 0] = 0
    selection = AdapterSelection(
        from_numpy(np.array(ranks, np.int32), ops.device),
        from_numpy(np.full(room * num_rows * parts * max_rank, np.nan, np.float32), ops.device),
    )
    tensors = [from_numpy(array, ops.device) for array in (a, b, factors)]
    return LoraStack(tensors[0], tensors[1], tensors[2], part_rows, selection)
