"""Rotary embeddings, the paged KV cache and attention over it, on the CPU.

Rows with one query (decode) are computed together, in groups of equal padded length. A row's padded
length and therefore its float32 result depend on nothing but the row itself. Rows with several
queries (prefill chunks) are computed one after another, a tile of queries at a time.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tessera.engine.formats.fp8 import E4M3_VALUES, codes_of
from tessera.engine.ops.cpu.norm import rms_normalised
from tessera.engine.ops.cpu.precision import Float32Array, finish, rounded, scratch, store, widen, widen_array
from tessera.engine.ops.cpu.workspace import Workspace
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, uint8

IntArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SHORTEST_PADDED_CONTEXT = 128
# Gathered keys of one group of decode rows: 1 MiB of float32, unless a single row needs more.
DECODE_ELEMENTS = 1 << 18
# Scores of one tile of queries: 8 MiB of float32, unless the fewest queries of a tile need more.
TILE_ELEMENTS = 1 << 21
MIN_TILE, MAX_TILE = 16, 256


class AttentionOps(Ops):
    workspace: Workspace

    def _caches(self, dtype: np.dtype[Any], cached: np.dtype[Any]) -> bool:
        return dtype in FLOAT_DTYPES and cached in (*FLOAT_DTYPES, uint8)

    @np.errstate(all="ignore")
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
    ) -> None:
        cos_sin, q_norm, k_norm, eps = transform
        _, num_kv_heads, _, head_dim = key_cache.shape
        heads = widen(qkv).reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        rotated = heads[:, : num_heads + num_kv_heads].copy()
        queries, keys, values = rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]
        if q_norm is not None:
            queries[...] = rms_normalised(queries, widen(q_norm), eps)
        if k_norm is not None:
            keys[...] = rms_normalised(keys, widen(k_norm), eps)
        if cos_sin is not None:
            rotate(rotated, cos_sin.numpy()[metadata.positions.numpy()])
        store(out, queries)

        slots = metadata.slot_mapping.numpy()
        kept = slots >= 0
        if not kept.all():
            slots, keys, values = slots[kept], keys[kept], values[kept]
        block, offset = np.divmod(slots, key_cache.shape[2])
        for kind, (elements, cache) in enumerate(((keys, key_cache), (values, value_cache))):
            if cache.dtype == uint8:
                scales = 1 if kv_scales is None else kv_scales.numpy()[kind, :, None]
                stored: Any = codes_of(widen_array(rounded(elements, qkv.dtype)) / scales)
            else:
                stored = rounded(elements, cache.dtype)
            cache.numpy()[block, :, offset] = stored

    def _rotate(self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_heads: int, head_dim: int) -> None:
        columns = qkv.numpy()[:, : num_heads * head_dim]
        heads = columns.astype(float32).reshape(len(columns), num_heads, head_dim)
        rotate(heads, cos_sin.numpy()[positions.numpy()])
        columns[...] = rounded(heads.reshape(columns.shape), qkv.dtype)

    @np.errstate(all="ignore")
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
    ) -> None:
        _, num_kv_heads, _, head_dim = key_cache.shape
        result = scratch(out)
        grouped = (q.shape[0], num_kv_heads, -1, head_dim)
        attention = PagedAttention(
            key_cache, value_cache, metadata, scale, sliding_window, soft_cap, kv_scales, self.workspace, sinks
        )
        attention.run(widen(q).reshape(grouped), result.reshape(grouped))
        finish(out, result)


class PagedAttention:
    """One call's inputs. G query heads share a key/value head; L is a length in cached positions."""

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        kv_scales: Tensor | None,
        workspace: Workspace,
        sinks: Tensor | None = None,
    ) -> None:
        self.workspace = workspace
        self.key_cache, self.value_cache = key_cache, value_cache
        self.num_kv_heads, self.block_size, self.head_dim = key_cache.shape[1:]
        self.block_tables = metadata.block_tables.numpy()
        self.table_rows = metadata.table_rows.numpy()
        self.starts = metadata.cu_seqlens_q.numpy()
        self.context_lens = metadata.context_lens.numpy()
        self.scale = np.float32(scale)
        self.sliding_window = sliding_window
        self.soft_cap = None if soft_cap is None else np.float32(soft_cap)
        self.sinks = None if sinks is None else widen(sinks).reshape(self.num_kv_heads, -1)  # [Hkv, G]
        self.kv_scales = None if kv_scales is None else kv_scales.numpy()

    def run(self, queries: Float32Array, out: Float32Array) -> None:
        """queries [T, Hkv, G, D] -> out, which may be the same memory."""
        query_lens = np.where(self.context_lens > 0, np.diff(self.starts), 0)
        if query_lens.sum() < len(out):
            self._clear_padding(out, query_lens)
        decode_rows = np.flatnonzero(query_lens == 1)
        if decode_rows.size:
            self._decode(decode_rows, queries, out)
        for row in np.flatnonzero(query_lens > 1):
            self._prefill(int(row), queries, out)

    def _clear_padding(self, out: Float32Array, query_lens: IntArray) -> None:
        padding = np.ones(len(out), bool)
        for row in np.flatnonzero(query_lens):
            padding[self.starts[row] : self.starts[row + 1]] = False
        out[padding] = 0

    def _first_visible(self, query_positions: IntArray) -> IntArray:
        """Position of the first key each query sees."""
        if self.sliding_window is None:
            return np.zeros_like(query_positions)
        first: IntArray = np.maximum(query_positions - (self.sliding_window - 1), 0)
        return first

    def _gather(self, name: str, cache: Tensor, block_tables: IntArray) -> Float32Array:
        """Blocks [..., W] of the cache -> [..., Hkv, W * block_size, D], in the workspace under `name`."""
        pool = cache.numpy().reshape(-1, self.block_size * self.head_dim)
        heads = np.arange(self.num_kv_heads)[:, None]
        chosen = block_tables[..., None, :].astype(np.intp) * self.num_kv_heads + heads
        shape = (*chosen.shape, pool.shape[1])
        gathered = self.workspace.array(name, shape, float32)
        if pool.dtype == float32:
            np.take(pool, chosen, axis=0, out=gathered, mode="clip")
        else:
            narrow = self.workspace.array("narrow", shape, pool.dtype)
            np.take(pool, chosen, axis=0, out=narrow, mode="clip")
            if pool.dtype == uint8:
                np.take(E4M3_VALUES, narrow, out=gathered)
                if self.kv_scales is not None:
                    gathered *= self.kv_scales[0 if name == "keys" else 1, :, None, None]
            else:
                gathered[...] = narrow
        length = block_tables.shape[-1] * self.block_size
        return gathered.reshape(*chosen.shape[:-1], length, self.head_dim)

    def _scores(self, queries: Float32Array, keys: Float32Array) -> Float32Array:
        """Scaled queries [..., n, D] times keys [..., L, D], capped -> [..., n, L], in the workspace."""
        shape = (*queries.shape[:-1], keys.shape[-2])
        scores: Float32Array = self.workspace.array("scores", shape, float32)
        np.matmul(queries, keys.swapaxes(-1, -2), out=scores)
        if self.soft_cap is not None:
            scores /= self.soft_cap
            np.tanh(scores, out=scores)
            scores *= self.soft_cap
        return scores

    def _decode(self, rows: IntArray, queries: Float32Array, out: Float32Array) -> None:
        ends = self.context_lens[rows]
        begins = self._first_visible(ends - 1)
        first_blocks = begins // self.block_size
        num_blocks = self._padded_blocks(ends - first_blocks * self.block_size)
        for width in np.unique(num_blocks):
            members = np.flatnonzero(num_blocks == width)
            row_elements = self.num_kv_heads * int(width) * self.block_size * self.head_dim
            step = max(DECODE_ELEMENTS // row_elements, 1)
            for start in range(0, len(members), step):
                part = members[start : start + step]
                tokens = self.starts[rows[part]]
                columns = first_blocks[part, None] + np.arange(width)
                # Columns beyond a table's width are padding like any other.
                columns = np.minimum(columns, self.block_tables.shape[1] - 1)
                tables = self.block_tables[self.table_rows[rows[part, None]], columns]
                base = first_blocks[part] * self.block_size
                out[tokens] = self._decode_group(queries[tokens], tables, begins[part] - base, ends[part] - base)

    def _padded_blocks(self, lengths: IntArray) -> IntArray:
        """Blocks for `lengths` positions, rounded up to 128, 256, 512, ... positions."""
        powers = np.ceil(np.log2(np.maximum(lengths, SHORTEST_PADDED_CONTEXT))).astype(np.int64)
        num_blocks: IntArray = -(-(1 << powers) // self.block_size)
        return num_blocks

    def _decode_group(
        self, queries: Float32Array, block_tables: IntArray, begins: IntArray, ends: IntArray
    ) -> Float32Array:
        """queries [R, Hkv, G, D] over the positions begins..ends - 1 of block_tables [R, W]."""
        keys = self._gather("keys", self.key_cache, block_tables)
        values = self._gather("values", self.value_cache, block_tables)
        # What follows a row's last token may be anything; NaN would survive even a weight of 0.
        for row, end in enumerate(ends.tolist()):
            values[row, :, end:] = 0
        positions = np.arange(keys.shape[2])
        hidden = (positions < begins[:, None]) | (positions >= ends[:, None])
        scores = self._scores(queries * self.scale, keys)
        np.copyto(scores, -np.inf, where=hidden[:, None, None])
        return _weighted_values(scores, values, self.sinks)

    def _prefill(self, row: int, queries: Float32Array, out: Float32Array) -> None:
        start, end = int(self.starts[row]), int(self.starts[row + 1])
        context_len = int(self.context_lens[row])
        offset = context_len - end  # from a token's index in the step to its position
        assert offset + start >= 0, "a row has more queries than tokens"
        positions = np.arange(offset + start, context_len)
        visible = self._first_visible(positions)
        first_block = int(visible[0]) // self.block_size
        table = self.block_tables[self.table_rows[row], first_block : -(-context_len // self.block_size)]
        keys = self._gather("keys", self.key_cache, table)
        values = self._gather("values", self.value_cache, table)
        base = first_block * self.block_size

        num_heads = queries.shape[1] * queries.shape[2]
        tile = min(max(TILE_ELEMENTS // (num_heads * (context_len - base)), MIN_TILE), MAX_TILE)
        for first in range(start, end, tile):
            last = min(first + tile, end)
            inside = slice(first - start, last - start)
            seen = slice(int(visible[inside.start]) - base, last + offset - base)
            hidden = Hidden(positions[inside], visible[inside])
            out[first:last] = self._attend_tile(
                queries[first:last] * self.scale, keys[:, seen], values[:, seen], hidden
            )

    def _attend_tile(
        self, queries: Float32Array, keys: Float32Array, values: Float32Array, hidden: Hidden
    ) -> Float32Array:
        """Scaled queries [n, Hkv, G, D] over keys and values [Hkv, L, D] -> [n, Hkv, G, D]."""
        n, num_kv_heads, group, head_dim = queries.shape
        by_head = np.ascontiguousarray(queries.transpose(1, 2, 0, 3)).reshape(num_kv_heads, group * n, head_dim)
        scores = self._scores(by_head, keys)
        hidden.apply(scores.reshape(num_kv_heads, group, n, -1))
        sinks = None if self.sinks is None else np.repeat(self.sinks, n, axis=1)
        result = _weighted_values(scores, values, sinks)
        return result.reshape(num_kv_heads, group, n, head_dim).transpose(2, 0, 1, 3)


class Hidden:
    """Which keys of a tile its queries must not see.

    The tile's keys are those of positions first[0]..positions[-1]: the last ones are hidden from the
    earlier queries by causality, the first ones from the later queries by the window.
    """

    def __init__(self, positions: IntArray, first: IntArray) -> None:
        self.count = len(positions)
        self.positions, self.first = positions[:, None], first[:, None]
        self.has_window = bool(first[-1] > first[0])

    def apply(self, scores: Float32Array) -> None:
        """scores [Hkv, G, n, L] of the hidden keys become -inf."""
        begin, end = int(self.first[0, 0]), int(self.positions[-1, 0]) + 1
        tail = np.arange(end - self.count, end)
        np.copyto(scores[..., -self.count :], -np.inf, where=tail > self.positions)
        if self.has_window:
            head = np.arange(begin, min(begin + self.count, end))
            np.copyto(scores[..., : len(head)], -np.inf, where=head < self.first)


def _weighted_values(scores: Float32Array, values: Float32Array, sinks: Float32Array | None) -> Float32Array:
    """softmax(scores [..., n, L]) times values [..., L, D]; the scores are overwritten.

    exp(sinks), [Hkv, n], is added to the sums that the softmax divides by.
    """
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        np.maximum(largest, sinks[..., None], out=largest)
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[..., None] - largest)
    weighted: Float32Array = np.matmul(scores, values)
    weighted /= total
    return weighted


def rotate(heads: Float32Array, cos_sin: Float32Array) -> None:
    """Rotate the pairs (i, i + half) of heads [T, H, D] in place by cos_sin [T, 2 * half]."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = turned
