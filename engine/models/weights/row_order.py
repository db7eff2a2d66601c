"""Rows of checkpoints in another order than the forwards want them, and those that a rank has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera.engine.models.config import ModelConfig
from tessera.engine.models.quantised.stored import StoredMatrix
from tessera.engine.models.registry import Architecture
from tessera.engine.models.weights.build import Field, NormField

Array = np.ndarray[Any, Any]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Chosen:
    """Rows and columns of a tensor: row i is row `rows[i]` of the stored one. None: all."""

    def __init__(self, stored: Array | StoredMatrix, rows: Rows | None, columns: slice | None) -> None:
        height, *width = stored.shape
        if columns is not None:
            width = [columns.stop - columns.start]
        self.shape = (height if rows is None else len(rows), *width)
        self.dtype = stored.dtype
        self._stored, self._rows, self._columns = stored, rows, columns

    def __getitem__(self, rows: slice) -> Array:
        found = self._stored[rows] if self._rows is None else self._of(self._rows[rows])
        return found if self._columns is None else found[:, self._columns]

    def _of(self, wanted: Rows) -> Array:
        first, last = int(wanted.min()), int(wanted.max())
        if last - first + 1 == len(wanted) and (np.diff(wanted) == 1).all():
            return self._stored[first : last + 1]
        if isinstance(self._stored, StoredMatrix):
            return self._stored[first : last + 1][wanted - first]
        return self._stored[wanted]


class Piece(NamedTuple):
    """What a weight has of a tensor.

    Attributes:
        name: of the tensor.
        height: its rows.
        rows: which of them, in the weight's order; None: all as they are stored.
        size: how many these are.
    """

    name: str
    height: int
    rows: Rows | None
    size: int


def pieces_of(names: tuple[str, ...], heights: tuple[int, ...], order: Rows | None, share: Rows | None) -> list[Piece]:
    """A share of the rows of a weight, whose parts of these heights have these names; a single name has all parts.

    `order` is that of `row_order`.
    """
    found: list[Piece] = []
    start = 0
    for name, height in zip(names, (sum(heights),) if len(names) == 1 else heights, strict=True):
        rows, stored = None, height
        if order is not None:
            rows = order[start : start + height] - start
            stored = int(rows.max()) + 1
        if share is not None:
            inside = share[(share >= start) & (share < start + height)] - start
            rows = inside if rows is None else rows[inside]
        size = height if rows is None else len(rows)
        if size:
            found.append(Piece(name, stored, rows, size))
        start += height
    return found


def row_order(
    config: ModelConfig, architecture: Architecture, field: Field, layer: int | None, *, fused_order: bool
) -> Rows | None:
    """Which stored row each row of a weight is, its parts one below the other; None where they are in order.

    `fused_order`: the checkpoint has queries, keys and values of one tensor in the architecture's own order.
    """
    if field.name == "position_embedding" and architecture.skipped_positions:
        return np.arange(config.max_position_embeddings) + architecture.skipped_positions
    if field.name not in ("qkv", "q_norm", "k_norm") or layer is None:
        return None
    spec = config.layers[layer].attention
    order = None
    if architecture.rope_interleaved and spec.rope is not None:
        heads = _halves_of_pairs(spec.head_dim, config.ropes[spec.rope].rotary_dim)
        if isinstance(field, NormField):
            return _repeated(heads, field.size // spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        order = np.arange(spec.qkv_size)
        order[: num_rotated * spec.head_dim] = _repeated(heads, num_rotated)
    if isinstance(field, NormField):
        return None
    if fused_order and architecture.qkv_order is not None:
        fused = architecture.qkv_order(spec)
        order = fused if order is None else fused[order]
    return order


def _halves_of_pairs(head_dim: int, rotary_dim: int) -> Rows:
    """Elements (2 i, 2 i + 1) of a head become (i, i + rotary_dim / 2)."""
    order = np.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].reshape(-1, 2).T.ravel()
    return order


def _repeated(order: Rows, heads: int) -> Rows:
    return np.asarray(np.arange(heads)[:, None] * len(order) + order).ravel()
