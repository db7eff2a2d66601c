"""Attention over the paged KV cache; see `tessera.engine.ops.interface`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.ops.checks import CheckedOps, require_cos_sin
from tessera.engine.ops.checks import require as _require
from tessera.engine.tensor import Tensor, uint8

# Tokens: how attention over a few rows is divided may depend on whether any of them may have more.
SHORT_CONTEXT = 2048


@dataclass(frozen=True)
class AttentionMetadata:
    """Where each token of a step belongs; tensors on the device, maxima on the host.

    A row whose context length is 0 is padding: its queries' outputs are zeros, and its place in
    `block_tables` is not looked at. A `slot_mapping` of -1 stores nothing.
    """

    positions: Tensor  # [T] int32, rows of cos_sin
    slot_mapping: Tensor  # [T] int32, block * block_size + offset
    block_tables: Tensor  # [P, W] int32
    table_rows: Tensor  # [R] int32, each row's place in block_tables
    cu_seqlens_q: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32, including this step's tokens
    max_seqlen_q: int
    max_context_len: int
    verifies: bool = False  # rows are tokens with drafts: each query has the bits of a row of its own


class HeadTransform(NamedTuple):
    """What queries and keys go through before attention.

    Attributes:
        cos_sin: [P, rotary_dim] float32, of which a token takes the row that `positions` names: the first half holds
            cosines, the second sines; rotary pairs are (i, i + rotary_dim / 2) of a head's first rotary_dim elements
            (Su et al. 2021, half-split). None rotates nothing.
        q_norm: [D] weight of an RMSNorm over each query head before the rotation, or None.
        k_norm: the same of key heads.
        eps: of these norms.
    """

    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6


class AttentionOps(CheckedOps):
    """Letters: T tokens, R sequences, D head size, Hq query heads, Hkv key/value heads."""

    # -- attention ------------------------------------------------------------------------------

    def rope_and_store(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        *,
        num_heads: int,
        kv_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values in the cache, return queries.

        qkv [T, (Hq + 2 Hkv) * D], each token's query, key and value heads in that order. key_cache
        and value_cache [num_blocks, Hkv, block_size, D], of the activations' dtype, or uint8: e4m3, which
        times a head's `kv_scales` [2, Hkv] float32 (keys, values; None: 1) are what it holds. -> [T, Hq * D].
        """
        self._check(out=out, kv_scales=kv_scales)
        self._check_rope(qkv, key_cache, value_cache, metadata, transform, num_heads)
        head_dim = key_cache.shape[3]
        out = self._out(out, (qkv.shape[0], num_heads * head_dim), qkv.dtype)
        if qkv.size:
            self._rope_and_store(qkv, key_cache, value_cache, metadata, transform, num_heads, kv_scales, out)
        return out

    def rotate(self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, *, num_heads: int, head_dim: int) -> Tensor:
        """Rotate the first `num_heads` heads of each row of qkv [T, W] in place, as `HeadTransform` says; qkv is
        returned. For models whose queries and keys pass their norms after the rotation."""
        self._check(qkv=qkv, cos_sin=cos_sin, positions=positions)
        _require(qkv.ndim == 2 and num_heads * head_dim <= qkv.shape[1], "rotate", qkv)
        _require(positions.shape == qkv.shape[:1], "positions", positions, qkv)
        require_cos_sin(cos_sin, head_dim)
        if qkv.size:
            self._rotate(qkv, cos_sin, positions, num_heads, head_dim)
        return qkv

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal softmax(q k^T * scale) v over each row's cached keys; q [T, Hq * D] -> same.

        Any mix of rows: a row's queries are its last `cu_seqlens_q[r+1] - cu_seqlens_q[r]` tokens.
        Query heads share key/value heads in groups of Hq / Hkv. With a sliding window of w a query
        sees itself and the w - 1 tokens before it. With a soft cap c, scores s become c * tanh(s / c)
        (Gemma 2) before the softmax. exp(sinks[h]), of [Hq], is added to the sum that head h's softmax
        divides by; with sinks there is no soft cap.
        """
        self._check(out=out, kv_scales=kv_scales)
        self._check_attention(q, key_cache, value_cache, metadata, soft_cap, sinks)
        out = self._out(out, q.shape, q.dtype)
        if q.size:
            self._paged_attention(
                q, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, sinks, kv_scales, out
            )
        return out

    def attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        *,
        num_heads: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
        queries: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`rope_and_store`, then `paged_attention` of what it returns; `queries` [T, Hq * D] is scratch."""
        self._check(qkv=qkv, queries=queries, out=out, kv_scales=kv_scales)
        self._check_rope(qkv, key_cache, value_cache, metadata, transform, num_heads)
        self._check_attention(queries, key_cache, value_cache, metadata, soft_cap, sinks)
        shape = (qkv.shape[0], num_heads * key_cache.shape[3])
        _require(queries.shape == shape and queries.dtype == qkv.dtype, "attention scratch", queries, qkv)
        out = self._out(out, shape, qkv.dtype)
        if qkv.size:
            inputs = (qkv, key_cache, value_cache, metadata, transform)
            self._attention(*inputs, num_heads, scale, sliding_window, soft_cap, sinks, kv_scales, queries, out)
        return out

    def _check_rope(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        num_heads: int,
    ) -> None:
        cos_sin, q_norm, k_norm, _ = transform
        self._check(qkv=qkv, key_cache=key_cache, value_cache=value_cache, cos_sin=cos_sin, q_norm=q_norm)
        self._check(k_norm=k_norm, positions=metadata.positions, slot_mapping=metadata.slot_mapping)
        num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
        width = (num_heads + 2 * num_kv_heads) * head_dim
        _require(qkv.ndim == 2 and qkv.shape[1] == width, "rope_and_store", qkv, key_cache)
        _require(key_cache.shape == value_cache.shape and key_cache.ndim == 4, "KV cache", key_cache, value_cache)
        _require(key_cache.dtype == value_cache.dtype, "KV cache", key_cache, value_cache)
        _require(self._caches(qkv.dtype, key_cache.dtype), "rope_and_store", qkv, key_cache)
        _require(metadata.positions.shape == qkv.shape[:1], "positions", metadata.positions, qkv)
        _require(metadata.slot_mapping.shape == qkv.shape[:1], "slot_mapping", metadata.slot_mapping, qkv)
        if cos_sin is not None:
            require_cos_sin(cos_sin, head_dim)
        for norm in (q_norm, k_norm):
            if norm is not None:
                _require(norm.shape == (head_dim,) and norm.dtype == qkv.dtype, "head norm", norm, qkv)

    def _check_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> None:
        self._check(q=q, key_cache=key_cache, value_cache=value_cache, sinks=sinks)
        _require(soft_cap is None or soft_cap > 0, "soft cap", q)
        _require(soft_cap is None or sinks is None, "attention with either a soft cap or sinks", q)
        self._check(**{f.name: v for f in fields(metadata) if isinstance(v := getattr(metadata, f.name), Tensor)})
        _, num_kv_heads, _, head_dim = key_cache.shape
        _require(q.ndim == 2 and q.shape[1] % (num_kv_heads * head_dim) == 0, "paged_attention", q, key_cache)
        _require(key_cache.shape == value_cache.shape, "KV cache", key_cache, value_cache)
        _require(key_cache.dtype == value_cache.dtype, "KV cache", key_cache, value_cache)
        _require(self._caches(q.dtype, key_cache.dtype), "paged_attention", q, key_cache)
        tables, rows = metadata.block_tables, metadata.table_rows
        _require(tables.ndim == 2 and rows.shape == metadata.context_lens.shape, "block tables", tables, rows)
        if sinks is not None:
            _require(sinks.shape == (q.shape[1] // head_dim,) and sinks.dtype == q.dtype, "sinks", sinks, q)

    # -- implementations ------------------------------------------------------------------------

    def _caches(self, dtype: np.dtype[Any], cached: np.dtype[Any]) -> bool:
        """Whether keys and values of `dtype` can be stored as, and attended in, a cache of `cached`."""
        return cached in (dtype, uint8)

    @abstractmethod
    def _rope_and_store(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        num_heads: int,
        kv_scales: Tensor | None,
        out: Tensor,
    ) -> None: ...
    @abstractmethod
    def _rotate(self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_heads: int, head_dim: int) -> None: ...
    @abstractmethod
    def _paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        kv_scales: Tensor | None,
        out: Tensor,
    ) -> None: ...

    def _attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        num_heads: int,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        kv_scales: Tensor | None,
        queries: Tensor,
        out: Tensor,
    ) -> None:
        self._rope_and_store(qkv, key_cache, value_cache, metadata, transform, num_heads, kv_scales, queries)
        self._paged_attention(
            queries, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, sinks, kv_scales, out
        )
