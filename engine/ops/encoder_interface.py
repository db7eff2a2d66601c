"""The operations that only text encoders and pooling need; see `tessera.engine.ops.interface`."""

from __future__ import annotations

from abc import abstractmethod

from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, int32


class EncoderOps(CheckedOps):
    """Letters: T tokens of R texts, one after the other; H hidden size, D head size, Hq heads."""

    def bidirectional_attention(
        self,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        num_heads: int,
        scale: float,
        cos_sin: Tensor | None = None,
        reach: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T * scale) v, every token of a text seeing the whole text (Vaswani et al. 2017).

        qkv [T, 3 * Hq * D], each token's query, key and value heads in that order. cu_seqlens [R + 1]
        int32: the first token of each text, and T. max_seqlen: tokens of the longest text.
        With cos_sin [P, rotary_dim] float32, P >= max_seqlen, queries and keys are rotated by their places in the
        text as in `HeadTransform`. With `reach` a token sees those at most this far from it, on both sides.
        -> [T, Hq * D].
        """
        self._check(qkv=qkv, cu_seqlens=cu_seqlens, cos_sin=cos_sin, out=out)
        require(qkv.ndim == 2 and qkv.shape[1] % (3 * num_heads) == 0, "bidirectional_attention", qkv)
        require(cu_seqlens.ndim == 1 and cu_seqlens.dtype == int32 and cu_seqlens.size > 0, "cu_seqlens", cu_seqlens)
        require(reach is None or reach >= 0, "reach", qkv)
        if cos_sin is not None:
            head_dim, places = qkv.shape[1] // (3 * num_heads), cos_sin.shape[0]
            fits = places >= max_seqlen and cos_sin.shape[1] <= head_dim and cos_sin.shape[1] % 2 == 0
            require(cos_sin.ndim == 2 and cos_sin.dtype == float32 and fits, "cos_sin", cos_sin)
        out = self._out(out, (qkv.shape[0], qkv.shape[1] // 3), qkv.dtype)
        if qkv.size:
            self._bidirectional_attention(qkv, cu_seqlens, max_seqlen, num_heads, scale, cos_sin, reach, out)
        return out

    def segment_mean(self, x: Tensor, begins: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
        """Mean over rows begins[r] .. ends[r] - 1 of x [T, H] -> [R, H] float32; begins, ends [R] int32.

        Segments hold at least one row and lie within x.
        """
        self._check(x=x, begins=begins, ends=ends, out=out)
        require(x.ndim == 2 and x.dtype in FLOAT_DTYPES, "segment_mean", x)
        require(begins.ndim == 1 and begins.shape == ends.shape, "segment_mean", begins, ends)
        require(begins.dtype == ends.dtype == int32, "segment_mean", begins, ends)
        out = self._out(out, (begins.shape[0], x.shape[1]), float32)
        if out.size:
            self._segment_mean(x, begins, ends, out)
        return out

    @abstractmethod
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
    ) -> None: ...
    @abstractmethod
    def _segment_mean(self, x: Tensor, begins: Tensor, ends: Tensor, out: Tensor) -> None: ...
