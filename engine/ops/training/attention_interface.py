"""RoPE and attention over packed sequences, without a cache; see `tessera.engine.ops.training.interface`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.checks import CheckedOps, require, require_cos_sin
from tessera.engine.tensor import FLOAT_DTYPES, Device, Tensor, float32, from_numpy, int32


@dataclass(frozen=True)
class PackedSequences:
    """R sequences that lie end to end in T rows; none sees another.

    Attributes:
        cu_seqlens: int32 [R + 1], where each begins; the last is T.
        positions: int32 [T], of each token in its sequence.
        max_seqlen: tokens of the longest.
    """

    cu_seqlens: Tensor
    positions: Tensor
    max_seqlen: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: Device) -> PackedSequences:
        """Raises: TesseraError where a length is below 1."""
        if not lengths or min(lengths) < 1:
            raise TesseraError(f"packed sequences have at least one token each, not {list(lengths)[:20]}")
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        return cls(from_numpy(ends, device), from_numpy(positions, device), max(lengths))

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


class AttentionTraining(CheckedOps):
    """Letters: T tokens, D head size, Hq query heads, Hkv key/value heads."""

    def rope(
        self,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        *,
        head_dim: int,
        num_rotated: int,
        inverse: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotate the first `num_rotated` heads of x [T, heads * D] by cos_sin's row of positions [T] int32; the others
        are copied. `cos_sin` is as in `HeadTransform`. `inverse` turns back, which is the gradient: with cosines and
        sines that a factor scales, it is the transposed map.
        """
        self._check(x=x, cos_sin=cos_sin, positions=positions, out=out)
        require(x.ndim == 2 and x.dtype in FLOAT_DTYPES and x.shape[1] % head_dim == 0, "rope", x)
        require(0 < num_rotated * head_dim <= x.shape[1], "rope of more heads than there are", x)
        require(positions.shape == x.shape[:1] and positions.dtype == int32, "rope's positions", positions, x)
        require_cos_sin(cos_sin, head_dim)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._rope(x, cos_sin, positions, head_dim, num_rotated, inverse, out)
        return out

    def packed_attention(
        self,
        qkv: Tensor,
        sequences: PackedSequences,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        sliding_window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Causal softmax(q k^T * scale) v within each sequence (Dao et al. 2022): no T x T matrix is kept.

        qkv [T, (Hq + 2 Hkv) * D], each token's query, key and value heads in that order. With a sliding window of w a
        query sees itself and the w - 1 tokens before it. -> out [T, Hq * D], and the logarithm of the sum of each
        query's exponentials, [Hq, T] float32.
        """
        head_dim = self._check_packed(qkv, sequences, num_heads, num_kv_heads, sliding_window)
        out = self._out(None, (qkv.shape[0], num_heads * head_dim), qkv.dtype)
        logsumexp = self._out(None, (num_heads, qkv.shape[0]), float32)
        self._packed_attention(qkv, sequences, num_heads, num_kv_heads, scale, sliding_window, out, logsumexp)
        return out, logsumexp

    def packed_attention_gradient(
        self,
        dout: Tensor,
        qkv: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        sequences: PackedSequences,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        """dqkv [T, (Hq + 2 Hkv) * D] from the gradient of `packed_attention`'s result and what it gave."""
        head_dim = self._check_packed(qkv, sequences, num_heads, num_kv_heads, sliding_window)
        self._check(dout=dout, out=out, logsumexp=logsumexp)
        shape = (qkv.shape[0], num_heads * head_dim)
        fits = dout.shape == out.shape == shape and dout.dtype == out.dtype == qkv.dtype
        require(fits, "packed_attention_gradient", dout, out, qkv)
        fits = logsumexp.shape == (num_heads, qkv.shape[0]) and logsumexp.dtype == float32
        require(fits, "packed_attention_gradient", logsumexp, qkv)
        dqkv = self._out(None, qkv.shape, qkv.dtype)
        self._packed_attention_gradient(
            *(dout, qkv, out, logsumexp, sequences, num_heads, num_kv_heads, scale, sliding_window, dqkv)
        )
        return dqkv

    def _check_packed(
        self, qkv: Tensor, sequences: PackedSequences, num_heads: int, num_kv_heads: int, window: int | None
    ) -> int:
        """-> head size."""
        self._check(qkv=qkv, cu_seqlens=sequences.cu_seqlens, positions=sequences.positions)
        heads = num_heads + 2 * num_kv_heads
        grouped = num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0
        require(grouped and qkv.ndim == 2 and qkv.dtype in FLOAT_DTYPES, "packed_attention", qkv)
        require(qkv.shape[1] > 0 and qkv.shape[1] % heads == 0, f"packed_attention of {heads} heads", qkv)
        require(sequences.num_tokens == qkv.shape[0] > 0, "packed sequences", sequences.positions, qkv)
        if window is not None and window < 1:
            raise TesseraError(f"a sliding window has at least one token, not {window}")
        return qkv.shape[1] // heads

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _rope(
        self,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        head_dim: int,
        num_rotated: int,
        inverse: bool,
        out: Tensor,
    ) -> None: ...
    @abstractmethod
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
    ) -> None: ...
    @abstractmethod
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
    ) -> None: ...
