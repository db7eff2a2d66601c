"""Rows of checkpoints in another order than the forwards want them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.models.config import ModelConfig
from tessera.engine.models.quantised.stored import StoredMatrix
from tessera.engine.models.registry import Architecture
from tessera.engine.models.weights.build import Field, NormField

Array = np.ndarray[Any, Any]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Reordered:
    """A tensor whose row i is row `order[i]` of the stored one."""

    def __init__(self, stored: Array | StoredMatrix, order: Rows) -> None:
        self.shape = (len(order), *stored.shape[1:])
        self.dtype = stored.dtype
        self._stored = stored
        self._order = order

    def __getitem__(self, rows: slice) -> Array:
        wanted = self._order[rows]
        if not isinstance(self._stored, StoredMatrix):
            return self._stored[wanted]
        first = int(wanted.min())
        return self._stored[first : int(wanted.max()) + 1][wanted - first]


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
