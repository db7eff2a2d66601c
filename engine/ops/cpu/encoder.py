"""Bidirectional attention and pooling on the CPU."""

from __future__ import annotations

import itertools

import numpy as np

from tessera.engine.ops.cpu.precision import store, widen
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, float32

SCORE_ELEMENTS = 1 << 20  # of the scores computed at a time, so that long texts need no more memory


class EncoderOps(Ops):
    @np.errstate(all="ignore")
    def _bidirectional_attention(
        self, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, num_heads: int, scale: float, out: Tensor
    ) -> None:
        num_tokens, width = out.shape
        queries, keys, values = (
            part.reshape(num_tokens, num_heads, width // num_heads).swapaxes(0, 1)
            for part in np.split(widen(qkv), 3, axis=1)
        )
        attended = np.zeros((num_heads, num_tokens, width // num_heads), float32)
        bounds = cu_seqlens.numpy().tolist()
        for begin, end in itertools.pairwise(bounds):
            step = max(SCORE_ELEMENTS // (num_heads * max(end - begin, 1)), 1)
            keys_of_text, values_of_text = keys[:, begin:end].swapaxes(1, 2), values[:, begin:end]
            for first in range(begin, end, step):
                rows = slice(first, min(first + step, end))
                weights = (queries[:, rows] * np.float32(scale)) @ keys_of_text
                weights -= weights.max(axis=-1, keepdims=True)
                np.exp(weights, out=weights)
                weights /= weights.sum(axis=-1, keepdims=True)
                attended[:, rows] = weights @ values_of_text
        store(out, np.ascontiguousarray(attended.swapaxes(0, 1)))

    @np.errstate(all="ignore")
    def _segment_mean(self, x: Tensor, begins: Tensor, ends: Tensor, out: Tensor) -> None:
        rows, result = widen(x), out.numpy()
        for segment, (begin, end) in enumerate(zip(begins.numpy(), ends.numpy(), strict=True)):
            result[segment] = rows[begin:end].mean(axis=0)
