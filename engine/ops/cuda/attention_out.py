"""Attention and the product behind it as one kernel, for the one or two rows of a small model's decode step."""

from __future__ import annotations

from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.ops.cuda.attention_decode import GROUP_ROWS, HALF_BYTES, PADDING, WARP_KEYS
from engine.ops.cuda.types import WARP_SIZE
from engine.tensor import float32

ATTENTION_OUT = KernelSpec(
    file="attention_out.cu",
    name="attention_out_kernel",
    template=("T", "HEAD_DIM"),
    parameters=(
        ("qkv", "pointer"),
        ("key_cache", "pointer"),
        ("value_cache", "pointer"),
        ("block_tables", "pointer"),
        ("table_rows", "pointer"),
        ("cu_seqlens_q", "pointer"),
        ("context_lens", "pointer"),
        ("q_norm", "pointer"),
        ("k_norm", "pointer"),
        ("cos_sin", "pointer"),
        ("positions", "pointer"),
        ("slot_mapping", "pointer"),
        ("weight", "pointer"),
        ("out", "pointer"),
        ("partial_out", "pointer"),
        ("arrivals", "pointer"),
        ("num_heads", "int32"),
        ("num_kv_heads", "int32"),
        ("rotary_dim", "int32"),
        ("block_size", "int32"),
        ("block_table_width", "int32"),
        ("sliding_window", "int32"),
        ("hidden", "int32"),
        ("eps", "float32"),
        ("scale_log2", "float32"),
    ),
    min_arch=90,
    overlaps=True,
)
SPECS = (ATTENTION_OUT,)

# As in the kernel.
CLUSTER_BLOCKS = 8
WARPS = 4
FEATURES = 16  # that a warp computes at a time

HEAD_DIMS = (64, 128)
MAX_ROWS = 2
# A block keeps its part of the weight in shared memory; with more than this the next kernel's would not fit beside.
MAX_SHARED_BYTES = 112 << 10
STATIC_BYTES = 1 << 10  # at most


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched here for elements of these C types."""
    return [(ATTENTION_OUT, (dtype, str(size))) for dtype in dtypes if dtype != "float" for size in HEAD_DIMS]


def shared_bytes(head_dim: int, group: int, hidden: int) -> int:
    """Dynamic shared memory of a block, for `group` query heads of a key/value head."""
    columns, pitch = group * head_dim, head_dim + PADDING
    exchanged = CLUSTER_BLOCKS * columns * float32.itemsize
    weight = hidden // CLUSTER_BLOCKS * (columns + PADDING)
    heads = group * pitch + 2 * head_dim + columns
    return exchanged + (WARPS * 2 * WARP_KEYS * pitch + weight + heads) * HALF_BYTES


def is_for(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, hidden: int, *, max_shared_bytes: int
) -> bool:
    """Whether the kernel can do it with `max_shared_bytes` a block, and is the faster way."""
    group = num_heads // num_kv_heads
    return (
        num_rows <= MAX_ROWS
        and head_dim in HEAD_DIMS
        and group <= GROUP_ROWS
        and num_heads >= CLUSTER_BLOCKS  # so many counters a row there are
        and hidden % (CLUSTER_BLOCKS * FEATURES) == 0
        and shared_bytes(head_dim, group, hidden) <= min(MAX_SHARED_BYTES, max_shared_bytes - STATIC_BYTES)
    )


def config(num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, hidden: int) -> LaunchConfig:
    memory = shared_bytes(head_dim, num_heads // num_kv_heads, hidden)
    return LaunchConfig((CLUSTER_BLOCKS, num_kv_heads, num_rows), (WARPS * WARP_SIZE, 1, 1), memory)
