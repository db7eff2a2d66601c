"""Attention of rows with two or more queries on sm_90a's own tensor-core instructions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cuda.device import CudaDevice
from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.cuda.tensor_map import row_groups_map
from engine.ops.cuda.types import ceil_div, cuda_type
from engine.ops.interface import AttentionMetadata
from engine.tensor import Tensor

PAGED_ATTENTION_PREFILL_HOPPER = KernelSpec(
    file="attention_prefill_hopper.cu",
    name="paged_attention_prefill_hopper_kernel",
    template=("T", "HEAD_DIM", "CONSUMERS", "STAGES"),
    parameters=(
        ("key_map", "tensor_map"),
        ("value_map", "tensor_map"),
        ("q", "pointer"),
        ("block_tables", "pointer"),
        ("table_rows", "pointer"),
        ("cu_seqlens_q", "pointer"),
        ("context_lens", "pointer"),
        ("out", "pointer"),
        ("num_seqs", "int32"),
        ("num_heads", "int32"),
        ("num_kv_heads", "int32"),
        ("block_size", "int32"),
        ("piece", "int32"),
        ("block_table_width", "int32"),
        ("sliding_window", "int32"),
        ("heads_at_once", "int32"),
        ("scale_log2", "float32"),
    ),
    min_arch=90,
    arch_specific=True,
    overlaps=True,
)
SPECS = (PAGED_ATTENTION_PREFILL_HOPPER,)

GROUP_THREADS = 128
GROUP_ROWS = 64
TILE_KEYS = 128
MIN_PIECE = 8  # keys: what lies swizzled in shared memory
ALIGNMENT_BYTES = 1024  # of the tiles in shared memory
ELEMENT_BYTES = 2
NEAR_BYTES = 40 << 20  # of keys and values: what the L2 keeps while tiles of queries pass over them


@dataclass(frozen=True)
class HopperShape:
    """How the kernel treats one head size."""

    head_dim: int
    consumers: int  # groups of four warps, 64 rows each
    stages: int

    @property
    def tile_rows(self) -> int:
        return GROUP_ROWS * self.consumers

    @property
    def template(self) -> tuple[str, ...]:
        return (str(self.head_dim), str(self.consumers), str(self.stages))


SHAPES = {
    shape.head_dim: shape for shape in (HopperShape(64, consumers=3, stages=2), HopperShape(128, consumers=2, stages=2))
}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [
        (PAGED_ATTENTION_PREFILL_HOPPER, (dtype, *shape.template))
        for dtype in dtypes
        if dtype != "float"
        for shape in SHAPES.values()
    ]


def prefill_config(shape: HopperShape, num_tiles: int, multiprocessors: int) -> LaunchConfig:
    """A block for each multiprocessor, or for each of at most `num_tiles` tiles if they are fewer."""
    rows = 2 * (shape.tile_rows + shape.stages * TILE_KEYS)
    shared_bytes = rows * shape.head_dim * ELEMENT_BYTES + ALIGNMENT_BYTES
    grid = (min(multiprocessors, num_tiles), 1, 1)
    return LaunchConfig(grid, (GROUP_THREADS * (shape.consumers + 1), 1, 1), shared_bytes)


def most_tiles(shape: HopperShape, num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int) -> int:
    """Tiles that `num_tokens` can make however they are divided into rows: each row's last may be partial."""
    per_head = num_tokens * (num_heads // num_kv_heads) // shape.tile_rows + min(num_seqs, num_tokens)
    return per_head * num_kv_heads


def heads_at_once(num_keys: int, num_kv_heads: int, head_dim: int) -> int:
    """Heads whose keys and values are read at the same time; those of all together may not stay in the L2."""
    head_bytes = 2 * max(num_keys, 1) * head_dim * ELEMENT_BYTES
    parts = ceil_div(num_kv_heads, max(NEAR_BYTES // head_bytes, 1))
    return ceil_div(num_kv_heads, parts)


def launch_prefill(
    device: CudaDevice,
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    sliding_window: int,
    scale_log2: float,
    out: Tensor,
) -> bool:
    """Attend from all rows with two or more queries; False, and nothing done, if this is not for sm_90a.

    q and out [T, Hq * D] of 2-byte elements, 16-byte aligned like the caches; see `Ops.paged_attention`.
    """
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    shape = SHAPES.get(head_dim)
    if shape is None or block_size % MIN_PIECE or not PAGED_ATTENTION_PREFILL_HOPPER.supports(device.arch):
        return False
    num_seqs, num_heads = metadata.table_rows.shape[0], q.shape[1] // head_dim
    piece = math.gcd(block_size, TILE_KEYS)
    rows = num_blocks * num_kv_heads * block_size
    num_keys = min(metadata.max_context_len, metadata.max_seqlen_q + sliding_window)
    device.launch(
        PAGED_ATTENTION_PREFILL_HOPPER,
        (cuda_type(q.dtype), *shape.template),
        prefill_config(shape, most_tiles(shape, q.shape[0], num_seqs, num_heads, num_kv_heads), device.multiprocessors),
        row_groups_map(key_cache.pointer, q.dtype, rows, head_dim, piece),
        row_groups_map(value_cache.pointer, q.dtype, rows, head_dim, piece),
        q,
        metadata.block_tables,
        metadata.table_rows,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        out,
        num_seqs,
        num_heads,
        num_kv_heads,
        block_size,
        piece,
        metadata.block_tables.shape[1],
        sliding_window,
        heads_at_once(num_keys, num_kv_heads, head_dim),
        scale_log2,
    )
    return True
