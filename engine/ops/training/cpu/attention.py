"""RoPE and packed attention on the CPU, a tile of queries and a block of keys at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tessera.engine.ops.cpu.attention import rotate
from tessera.engine.ops.cpu.precision import Float32Array, store, widen
from tessera.engine.ops.training.attention_interface import PackedSequences
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor

TILE = 128  # queries; at most BLOCK, so that a tile's last block of keys holds its diagonal
BLOCK = 256  # keys


class CpuAttentionTraining(TrainingOps):
    @np.errstate(all="ignore")
    def _rope(
        self,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        head_dim: int,
        num_rotated: int,
        inverse: bool,
        out: Tensor,
    ) -> None:
        heads = widen(x).reshape(x.shape[0], -1, head_dim).copy()
        table = cos_sin.numpy()[positions.numpy()]
        if inverse:
            table[:, table.shape[1] // 2 :] *= -1
        rotate(heads[:, :num_rotated], table)
        store(out, heads)

    @np.errstate(all="ignore")
    def _packed_attention(
        self,
        qkv: Tensor,
        sequences: PackedSequences,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None,
        out: Tensor,
        logsumexp: Tensor,
    ) -> None:
        shape = _Heads(num_heads, num_kv_heads)
        for rows in _rows(sequences):
            queries, keys, values = shape.split(widen(qkv[rows]), scale)
            attended = np.empty_like(queries)
            logs = np.empty(queries.shape[:3], np.float32)
            for tile in _tiles(keys.shape[1], window):
                attended[:, :, tile.rows], logs[:, :, tile.rows] = _attend(queries, keys, values, tile)
            store(out[rows], shape.joined(attended))
            logsumexp.numpy()[:, rows] = logs.reshape(num_heads, -1)

    @np.errstate(all="ignore")
    def _packed_attention_gradient(
        self,
        dout: Tensor,
        qkv: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        sequences: PackedSequences,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None,
        dqkv: Tensor,
    ) -> None:
        shape = _Heads(num_heads, num_kv_heads)
        for rows in _rows(sequences):
            queries, keys, values = shape.split(widen(qkv[rows]), scale)
            upper, attended = (shape.queries(widen(tensor[rows])) for tensor in (dout, out))
            logs = logsumexp.numpy()[:, rows].reshape(queries.shape[:3])
            along = (upper * attended).sum(axis=-1)
            gradients = tuple(np.zeros_like(part) for part in (queries, keys, values))
            for tile in _tiles(keys.shape[1], window):
                _attend_backward(queries, keys, values, upper, logs, along, tile, gradients)
            np.multiply(gradients[0], np.float32(scale), out=gradients[0])
            store(dqkv[rows], np.concatenate([shape.joined(part) for part in gradients], axis=1))


class _Heads(NamedTuple):
    """Between rows of heads side by side and arrays by key/value head."""

    num_heads: int
    num_kv_heads: int

    def queries(self, rows: Float32Array) -> Float32Array:
        """[n, Hq * D] -> [Hkv, G, n, D]"""
        heads = rows.reshape(len(rows), self.num_kv_heads, self.num_heads // self.num_kv_heads, -1)
        return np.ascontiguousarray(heads.transpose(1, 2, 0, 3))

    def split(self, rows: Float32Array, scale: float) -> tuple[Float32Array, Float32Array, Float32Array]:
        """[n, (Hq + 2 Hkv) * D] -> queries [Hkv, G, n, D] times `scale`, keys and values [Hkv, n, D]."""
        head_dim = rows.shape[1] // (self.num_heads + 2 * self.num_kv_heads)
        ends = [self.num_heads * head_dim, (self.num_heads + self.num_kv_heads) * head_dim]
        first, *others = np.split(rows, ends, axis=1)
        queries = self.queries(first) * np.float32(scale)  # a copy: `queries` may share the rows' memory
        keys, values = (
            np.ascontiguousarray(part.reshape(len(rows), self.num_kv_heads, head_dim).transpose(1, 0, 2))
            for part in others
        )
        return queries, keys, values

    def joined(self, heads: Float32Array) -> Float32Array:
        """[..., n, D] -> [n, heads * D]"""
        by_head = heads.reshape(-1, *heads.shape[-2:])
        return np.ascontiguousarray(by_head.transpose(1, 0, 2)).reshape(heads.shape[-2], -1)


class _Tile(NamedTuple):
    """A tile of queries, and the blocks of keys that they see, the diagonal's first."""

    rows: slice
    blocks: tuple[tuple[slice, Float32Array | None], ...]  # keys, and 0 or -inf to add to [queries, keys]


def _rows(sequences: PackedSequences) -> Iterator[slice]:
    ends = sequences.cu_seqlens.numpy().tolist()
    return map(slice, ends[:-1], ends[1:])


def _tiles(length: int, window: int | None) -> Iterator[_Tile]:
    for start in range(0, length, TILE):
        stop = min(start + TILE, length)
        first = 0 if window is None else max(start - window + 1, 0)
        blocks = []
        for end in range(stop, first, -BLOCK):
            keys = slice(max(end - BLOCK, first), end)
            blocks.append((keys, _mask(start, stop, keys, window)))
        yield _Tile(slice(start, stop), tuple(blocks))


def _mask(start: int, stop: int, keys: slice, window: int | None) -> Float32Array | None:
    """None where every query sees every key."""
    if keys.stop <= start + 1 and (window is None or keys.start > stop - 1 - window):
        return None
    query, key = np.arange(start, stop)[:, None], np.arange(keys.start, keys.stop)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _scores(tile: Float32Array, keys: Float32Array, mask: Float32Array | None, group: int) -> Float32Array:
    """tile [Hkv, G * n, D], keys [Hkv, b, D] -> [Hkv, G * n, b]"""
    scores: Float32Array = np.matmul(tile, keys.transpose(0, 2, 1))
    if mask is not None:
        by_group = scores.reshape(len(scores), group, *mask.shape)
        by_group += mask
    return scores


def _attend(
    queries: Float32Array, keys: Float32Array, values: Float32Array, tile: _Tile
) -> tuple[Float32Array, Float32Array]:
    """softmax over blocks with a running maximum (Milakov and Gimelshein 2018) -> result [Hkv, G, n, D], logs."""
    taken = queries[:, :, tile.rows]
    flat = taken.reshape(len(queries), -1, queries.shape[-1])
    highest = np.full((*flat.shape[:2], 1), -np.inf, np.float32)
    total, result = np.zeros_like(highest), np.zeros_like(flat)
    for place, mask in tile.blocks:
        scores = _scores(flat, keys[:, place], mask, queries.shape[1])
        above = np.maximum(highest, scores.max(axis=-1, keepdims=True))
        scores -= above
        np.exp(scores, out=scores)
        shrink = np.exp(highest - above)
        total = total * shrink + scores.sum(axis=-1, keepdims=True)
        result *= shrink
        result += np.matmul(scores, values[:, place])
        highest = above
    result /= total
    logs = (highest + np.log(total)).reshape(taken.shape[:3])
    return result.reshape(taken.shape), logs


def _attend_backward(
    queries: Float32Array,
    keys: Float32Array,
    values: Float32Array,
    upper: Float32Array,
    logs: Float32Array,
    along: Float32Array,
    tile: _Tile,
    gradients: tuple[Float32Array, ...],
) -> None:
    """Adds to the gradients of queries (without the scale), keys and values (Dao et al. 2022, algorithm 4)."""
    dqueries, dkeys, dvalues = gradients
    shape = queries[:, :, tile.rows].shape
    taken, dtaken, logs_of, along_of = (
        part[:, :, tile.rows].reshape(shape[0], shape[1] * shape[2], -1) for part in (queries, upper, logs, along)
    )
    total = np.zeros_like(taken)
    for place, mask in tile.blocks:
        weights = _scores(taken, keys[:, place], mask, shape[1])
        weights -= logs_of
        np.exp(weights, out=weights)
        dvalues[:, place] += np.matmul(weights.transpose(0, 2, 1), dtaken)
        dscores = np.matmul(dtaken, values[:, place].transpose(0, 2, 1))
        dscores -= along_of
        dscores *= weights
        total += np.matmul(dscores, keys[:, place])
        dkeys[:, place] += np.matmul(dscores.transpose(0, 2, 1), taken)
    dqueries[:, :, tile.rows] = total.reshape(shape)
