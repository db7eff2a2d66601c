"""One attention over packed sequences, as its kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.engine.ops.cuda.types import ceil_div
from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.tensor import Tensor

EVERY_KEY = 1 << 30  # a window that hides nothing


@dataclass(frozen=True)
class PackedProblem:
    """See `AttentionTraining.packed_attention`."""

    qkv: Tensor
    sequences: PackedSequences
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int

    @classmethod
    def of(
        cls,
        qkv: Tensor,
        sequences: PackedSequences,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None,
    ) -> PackedProblem:
        """`window` None: every key is seen."""
        seen = EVERY_KEY if window is None else min(window, EVERY_KEY)
        return cls(qkv, sequences, num_heads, num_kv_heads, scale, seen)

    @property
    def head_dim(self) -> int:
        return self.qkv.shape[1] // (self.num_heads + 2 * self.num_kv_heads)

    def tiles(self, rows: int) -> int:
        """Of `rows` tokens, that cover the longest sequence."""
        return ceil_div(self.sequences.max_seqlen, rows)

    def grid(self, rows: int, heads: int) -> tuple[int, int, int]:
        """A block for each tile of each sequence, and each head."""
        return self.tiles(rows) * (self.sequences.cu_seqlens.shape[0] - 1), heads, 1

    def fields(self, rows: int) -> dict[str, Any]:
        """Parameters that all kernels have."""
        return {
            "qkv": self.qkv,
            "cu_seqlens": self.sequences.cu_seqlens,
            "num_tokens": self.qkv.shape[0],
            "tiles": self.tiles(rows),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "window": self.window,
            "scale": self.scale,
        }
