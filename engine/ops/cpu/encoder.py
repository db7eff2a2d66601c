"""Bidirectional attention and pooling on the CPU."""

from __future__ import annotations

import itertools

import numpy as np

from tessera.engine.ops.cpu.attention import rotate
from tessera.engine.ops.cpu.precision import rounded, store, widen, widen_array
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, float32

SCORE_ELEMENTS = 1 << 20  # of the scores computed at a time, so that long texts need no more memory
MIN_LOCAL_STEP = 64  # queries computed at a time where they see only what is near


class EncoderOps(Ops):
    @np.errstate(all="ignore")
    def _bidirectional_attention(
        self,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        num_heads: int,
        scale: float,
        cos_sin: Tensor | None,
        reach: int | None,
        out: Tensor,
    ) -> None:
        num_tokens, width = out.shape
        heads = widen(qkv).reshape(num_tokens, 3 * num_heads, width // num_heads)
        starts = cu_seqlens.numpy()
        if cos_sin is not None:
            heads = heads.copy()
            places = np.arange(num_tokens) - np.repeat(starts[:-1], np.diff(starts))
            rotate(heads[:, : 2 * num_heads], cos_sin.numpy()[places])
            heads = widen_array(rounded(heads, qkv.dtype))
        queries, keys, values = np.split(heads.swapaxes(0, 1), 3)
        attended = np.zeros((num_heads, num_tokens, width // num_heads), float32)
        for begin, end in itertools.pairwise(starts.tolist()):
            step = max(SCORE_ELEMENTS // (num_heads * max(end - begin, 1)), 1)
            if reach is not None:
                step = min(step, max(reach, MIN_LOCAL_STEP))
            for first in range(begin, end, step):
                rows = slice(first, min(first + step, end))
                seen = slice(begin, end)
                if reach is not None:
                    seen = slice(max(begin, rows.start - reach), min(end, rows.stop + reach))
                weights = (queries[:, rows] * np.float32(scale)) @ keys[:, seen].swapaxes(1, 2)
                if reach is not None:
                    distance = np.arange(rows.start, rows.stop)[:, None] - np.arange(seen.start, seen.stop)
                    np.copyto(weights, -np.inf, where=np.abs(distance) > reach)
                weights -= weights.max(axis=-1, keepdims=True)
                np.exp(weights, out=weights)
                weights /= weights.sum(axis=-1, keepdims=True)
                attended[:, rows] = weights @ values[:, seen]
        store(out, np.ascontiguousarray(attended.swapaxes(0, 1)))

    @np.errstate(all="ignore")
    def _segment_mean(self, x: Tensor, begins: Tensor, ends: Tensor, out: Tensor) -> None:
        rows, result = widen(x), out.numpy()
        for segment, (begin, end) in enumerate(zip(begins.numpy(), ends.numpy(), strict=True)):
            result[segment] = rows[begin:end].mean(axis=0)
