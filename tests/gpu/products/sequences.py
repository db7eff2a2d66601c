"""Sequences whose bits are compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import bfloat16, empty, float16, from_numpy
from tests.support.cases.op_cases import random_angles, random_array

Array = np.ndarray[Any, Any]
DTYPES = {"bfloat16": bfloat16, "float16": float16}


def bits(array: Array) -> Array:
    return array.view(np.uint32 if array.dtype == np.float32 else np.uint16)


class Sequences:
    """Cached keys of sequences, and projections of their tokens."""

    BLOCK_SIZE = 16

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], dtype: Any, ops: CudaOps) -> None:
        num_heads, num_kv_heads, head_dim = heads
        rng = np.random.default_rng(11)
        blocks = [-(-length // self.BLOCK_SIZE) for length in lengths]
        order = rng.permutation(sum(blocks)).astype(np.int32)
        self.tables = np.zeros((len(lengths), max(blocks)), np.int32)
        for row, (count, start) in enumerate(zip(blocks, np.cumsum([0, *blocks]), strict=False)):
            self.tables[row, :count] = order[start : start + count]
        shape = (sum(blocks), num_kv_heads, self.BLOCK_SIZE, head_dim)
        self.ops, self.heads, self.lengths, self.dtype = ops, heads, lengths, dtype
        self.keys, self.values = (from_numpy(random_array(seed, shape, dtype), ops.device) for seed in (1, 2))
        self.qkv = [
            random_array(20 + row, (length, (num_heads + 2 * num_kv_heads) * head_dim), dtype)
            for row, length in enumerate(lengths)
        ]
        q_norm, k_norm = (from_numpy(random_array(seed, (head_dim,), dtype), ops.device) for seed in (3, 4))
        self.transform = HeadTransform(from_numpy(random_angles(max(lengths), head_dim), ops.device), q_norm, k_norm)

    def attend(
        self, pieces: list[tuple[int, int, int]], window: int | None, *, fused: bool = True, drafts: bool = False
    ) -> dict[tuple[int, int], bytes]:
        """By sequence and position the bits of what tokens see; pieces are (sequence, first token, tokens), each a row
        of the step, and their keys are stored by the way. `drafts`: they are tokens with their drafts."""
        num_heads, _, head_dim = self.heads
        positions = np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in pieces])
        rows = np.repeat([row for row, _, _ in pieces], [count for _, _, count in pieces])
        slots = self.tables[rows, positions // self.BLOCK_SIZE] * self.BLOCK_SIZE + positions % self.BLOCK_SIZE
        counts = [count for _, _, count in pieces]
        ends = np.array([first + count for _, first, count in pieces], np.int32)
        device = self.ops.device
        qkv = np.concatenate([self.qkv[row][first : first + count] for row, first, count in pieces])
        metadata = AttentionMetadata(
            positions=from_numpy(positions, device),
            slot_mapping=from_numpy(slots.astype(np.int32), device),
            block_tables=from_numpy(self.tables, device),
            table_rows=from_numpy(np.array([row for row, _, _ in pieces], np.int32), device),
            cu_seqlens_q=from_numpy(np.cumsum([0, *counts]).astype(np.int32), device),
            context_lens=from_numpy(ends, device),
            max_seqlen_q=max(max(counts), 1 if fused else 2),
            max_context_len=int(ends.max()),
            verifies=drafts,
        )
        scratch, out = (empty((len(positions), num_heads * head_dim), self.dtype, device) for _ in range(2))
        self.ops.attention(
            from_numpy(qkv, device),
            self.keys,
            self.values,
            metadata,
            self.transform,
            num_heads=num_heads,
            scale=head_dim**-0.5,
            sliding_window=window,
            queries=scratch,
            out=out,
        )
        found = out.numpy()
        return {(int(r), int(p)): found[i].tobytes() for i, (r, p) in enumerate(zip(rows, positions, strict=True))}
