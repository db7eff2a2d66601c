"""Rotary embeddings with the KV store, and attention over the paged cache.

16-bit dtypes with one of `HEAD_DIMS` run on tensor cores: rows with one query in the decode kernel,
rows with more in the prefill kernel. Everything else runs in a general kernel. A row's result
depends on nothing but the row, whatever is batched with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cuda.device import CudaDevice
from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.errors import TesseraError
from engine.ops.cuda.types import WARP_SIZE, ceil_div, cuda_type
from engine.ops.interface import AttentionMetadata, Ops
from engine.tensor import Tensor, empty, float32

ROPE_AND_STORE = KernelSpec(
    file="rope.cu",
    name="rope_and_store_kernel",
    template=("T", "VECTOR"),
    parameters=(
        ("qkv", "pointer"),
        ("q_norm", "pointer"),
        ("k_norm", "pointer"),
        ("cos_sin", "pointer"),
        ("positions", "pointer"),
        ("slot_mapping", "pointer"),
        ("key_cache", "pointer"),
        ("value_cache", "pointer"),
        ("out", "pointer"),
        ("num_tokens", "int32"),
        ("num_heads", "int32"),
        ("num_kv_heads", "int32"),
        ("head_dim", "int32"),
        ("rotary_dim", "int32"),
        ("block_size", "int32"),
        ("eps", "float32"),
    ),
)
PAGED_ATTENTION = KernelSpec(
    file="attention.cu",
    name="paged_attention_kernel",
    template=("T",),
    parameters=(
        ("q", "pointer"),
        ("key_cache", "pointer"),
        ("value_cache", "pointer"),
        ("block_tables", "pointer"),
        ("table_rows", "pointer"),
        ("cu_seqlens_q", "pointer"),
        ("context_lens", "pointer"),
        ("out", "pointer"),
        ("num_seqs", "int32"),
        ("num_heads", "int32"),
        ("num_kv_heads", "int32"),
        ("head_dim", "int32"),
        ("block_size", "int32"),
        ("block_table_width", "int32"),
        ("sliding_window", "int32"),
        ("scale_log2", "float32"),
    ),
)
PAGED_ATTENTION_PREFILL = KernelSpec(
    file="attention_prefill.cu",
    name="paged_attention_prefill_kernel",
    template=("T", "HEAD_DIM", "ROW_TILES", "TILE_KEYS"),
    parameters=(
        ("q", "pointer"),
        ("key_cache", "pointer"),
        ("value_cache", "pointer"),
        ("block_tables", "pointer"),
        ("table_rows", "pointer"),
        ("cu_seqlens_q", "pointer"),
        ("context_lens", "pointer"),
        ("out", "pointer"),
        ("num_seqs", "int32"),
        ("num_heads", "int32"),
        ("num_kv_heads", "int32"),
        ("block_size", "int32"),
        ("block_table_width", "int32"),
        ("sliding_window", "int32"),
        ("scale_log2", "float32"),
    ),
)
PAGED_ATTENTION_DECODE = KernelSpec(
    file="attention_decode.cu",
    name="paged_attention_decode_kernel",
    template=("T", "HEAD_DIM", "WARPS", "STAGES"),
    parameters=(
        ("q", "pointer"),
        ("key_cache", "pointer"),
        ("value_cache", "pointer"),
        ("block_tables", "pointer"),
        ("table_rows", "pointer"),
        ("cu_seqlens_q", "pointer"),
        ("context_lens", "pointer"),
        ("out", "pointer"),
        ("partial_out", "pointer"),
        ("partial_lse", "pointer"),
        ("num_tokens", "int32"),
        ("num_seqs", "int32"),
        ("num_heads", "int32"),
        ("num_kv_heads", "int32"),
        ("block_size", "int32"),
        ("block_table_width", "int32"),
        ("sliding_window", "int32"),
        ("min_split_keys", "int32"),
        ("max_splits", "int32"),
        ("scale_log2", "float32"),
    ),
)
PAGED_ATTENTION_COMBINE = KernelSpec(
    file="attention_decode.cu",
    name="paged_attention_combine_kernel",
    template=("T",),
    parameters=(
        ("partial_out", "pointer"),
        ("partial_lse", "pointer"),
        ("cu_seqlens_q", "pointer"),
        ("context_lens", "pointer"),
        ("out", "pointer"),
        ("head_dim", "int32"),
        ("splits", "int32"),
        ("sliding_window", "int32"),
        ("min_split_keys", "int32"),
        ("max_splits", "int32"),
    ),
)
SPECS = (
    ROPE_AND_STORE,
    PAGED_ATTENTION,
    PAGED_ATTENTION_PREFILL,
    PAGED_ATTENTION_DECODE,
    PAGED_ATTENTION_COMBINE,
)

MAX_HEAD_DIM = 256
BLOCK = (128, 1, 1)  # threads of all kernels here, but for decode with large heads
ROPE_WARPS = 4
HALF_BYTES = 2
PADDING = 8  # elements after each row of shared memory
NO_WINDOW = 1 << 30

DECODE_GROUP = 16  # query heads that a decode block handles
DECODE_TILE_KEYS = 16
MIN_SPLIT_KEYS = 256
MAX_SPLITS = 32
MIN_RESERVED_SPLITS = 8
RESERVED_BYTES = 128 << 20


@dataclass(frozen=True)
class HeadShape:
    """How the tensor-core kernels treat one head size."""

    head_dim: int
    row_tiles: int  # of 16 rows that a prefill warp holds
    tile_keys: int
    decode_warps: int
    decode_stages: int = 2

    @property
    def tile_rows(self) -> int:
        return 64 * self.row_tiles

    @property
    def prefill_template(self) -> tuple[str, ...]:
        return (str(self.head_dim), str(self.row_tiles), str(self.tile_keys))

    @property
    def decode_template(self) -> tuple[str, ...]:
        return (str(self.head_dim), str(self.decode_warps), str(self.decode_stages))


HEAD_SHAPES = {
    shape.head_dim: shape
    for shape in (
        HeadShape(64, row_tiles=2, tile_keys=64, decode_warps=4),
        HeadShape(96, row_tiles=2, tile_keys=64, decode_warps=4),
        HeadShape(128, row_tiles=2, tile_keys=64, decode_warps=4),
        HeadShape(256, row_tiles=1, tile_keys=32, decode_warps=2),
    )
}
HEAD_DIMS = tuple(HEAD_SHAPES)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    pairs: list[Instantiation] = []
    for dtype in dtypes:
        pairs += [(ROPE_AND_STORE, (dtype, vector)) for vector in ("1", "2")]
        pairs.append((PAGED_ATTENTION, (dtype,)))
        if dtype != "float":
            pairs.append((PAGED_ATTENTION_COMBINE, (dtype,)))
            for shape in HEAD_SHAPES.values():
                pairs.append((PAGED_ATTENTION_PREFILL, (dtype, *shape.prefill_template)))
                pairs.append((PAGED_ATTENTION_DECODE, (dtype, *shape.decode_template)))
    return pairs


def rope_config(num_tokens: int, num_heads: int, num_kv_heads: int) -> LaunchConfig:
    """One warp a head."""
    return LaunchConfig((ceil_div(num_tokens * (num_heads + 2 * num_kv_heads), ROPE_WARPS), 1, 1), BLOCK)


def prefill_config(shape: HeadShape, num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int) -> LaunchConfig:
    """As many tiles as `num_tokens` can make however they are divided into rows: each row's last may be partial."""
    group = num_heads // num_kv_heads
    tiles = num_tokens * group // shape.tile_rows + min(num_seqs, num_tokens)
    pitch = (shape.head_dim + PADDING) * HALF_BYTES
    shared_bytes = (shape.tile_rows + 2 * shape.tile_keys) * pitch + 8 * shape.tile_keys
    return LaunchConfig((tiles, num_kv_heads, 1), BLOCK, shared_bytes)


def decode_splits(max_context_len: int, sliding_window: int, max_splits: int) -> int:
    """The most splits that a row of up to `max_context_len` keys is divided into."""
    num_keys = min(max_context_len, sliding_window + DECODE_TILE_KEYS - 1)
    return min(max(ceil_div(num_keys, MIN_SPLIT_KEYS), 1), max_splits)


def decode_config(shape: HeadShape, num_seqs: int, num_heads: int, num_kv_heads: int, splits: int) -> LaunchConfig:
    """The last row of blocks clears tokens that belong to no row."""
    groups = num_kv_heads * ceil_div(num_heads // num_kv_heads, DECODE_GROUP)
    tile_bytes = DECODE_TILE_KEYS * (shape.head_dim + PADDING) * HALF_BYTES
    shared_bytes = shape.decode_warps * shape.decode_stages * 2 * tile_bytes
    return LaunchConfig((groups, num_seqs + 1, splits), (shape.decode_warps * WARP_SIZE, 1, 1), shared_bytes)


def combine_config(num_seqs: int, num_heads: int) -> LaunchConfig:
    return LaunchConfig((num_heads, num_seqs, 1), BLOCK)


def reserved_splits(max_num_seqs: int, num_heads: int, head_dim: int) -> int:
    """The most splits whose partial results fit into RESERVED_BYTES, within bounds."""
    fitting = RESERVED_BYTES // partial_bytes(max_num_seqs, num_heads, head_dim, 1)
    return min(max(fitting, MIN_RESERVED_SPLITS), MAX_SPLITS)


def partial_bytes(num_seqs: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Float32 outputs of all splits, and after them the logarithms of their sums."""
    return num_seqs * num_heads * splits * (head_dim + 1) * float32.itemsize


class AttentionOps(Ops):
    device: CudaDevice
    _max_splits: int = MAX_SPLITS
    _partials: Tensor | None = None

    def reserve_attention(self, max_num_seqs: int, num_heads: int, head_dim: int) -> None:
        """Allocate what steps of up to `max_num_seqs` rows need, so that serving allocates nothing.

        It also settles into how many parts a long context is divided, and so must come before the
        first step. Raises: OutOfMemoryError.
        """
        if head_dim in HEAD_SHAPES:
            self._max_splits = reserved_splits(max_num_seqs, num_heads, head_dim)
            self._partial_memory(partial_bytes(max_num_seqs, num_heads, head_dim, self._max_splits))

    def _partial_memory(self, nbytes: int) -> Tensor:
        if self._partials is None or self._partials.nbytes < nbytes:
            self._partials = empty((nbytes // float32.itemsize,), float32, self.device)
        return self._partials

    def _rope_and_store(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        cos_sin: Tensor | None,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        out: Tensor,
    ) -> None:
        _, num_kv_heads, block_size, head_dim = key_cache.shape
        rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
        tensors = (qkv, q_norm, k_norm, key_cache, value_cache, out)
        pairs = head_dim % 2 == 0 and rotary_dim % 4 == 0 and _aligned(2 * qkv.dtype.itemsize, *tensors)
        pairs = pairs and _aligned(2 * float32.itemsize, cos_sin)
        self.device.launch(
            ROPE_AND_STORE,
            (cuda_type(qkv.dtype), "2" if pairs else "1"),
            rope_config(qkv.shape[0], num_heads, num_kv_heads),
            qkv,
            q_norm,
            k_norm,
            cos_sin,
            metadata.positions,
            metadata.slot_mapping,
            key_cache,
            value_cache,
            out,
            qkv.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
            rotary_dim,
            block_size,
            eps,
        )

    def _paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        out: Tensor,
    ) -> None:
        _, num_kv_heads, block_size, head_dim = key_cache.shape
        if head_dim > MAX_HEAD_DIM:
            raise TesseraError(f"attention on CUDA takes heads of up to {MAX_HEAD_DIM} elements, not {head_dim}")
        assert scale > 0, "the kernels find the maximum before they scale"
        num_heads = q.shape[1] // head_dim
        num_seqs, block_table_width = metadata.table_rows.shape[0], metadata.block_tables.shape[1]
        window = NO_WINDOW if sliding_window is None else min(sliding_window, NO_WINDOW)
        scale_log2 = scale * math.log2(math.e)
        dtype = cuda_type(q.dtype)
        rows = (metadata.block_tables, metadata.table_rows, metadata.cu_seqlens_q, metadata.context_lens)
        inputs = (q, key_cache, value_cache, *rows)
        cache = (block_size, block_table_width, window)

        shape = HEAD_SHAPES.get(head_dim)
        if shape is None or q.dtype == float32 or not _aligned(16, q, key_cache, value_cache, out):
            config = LaunchConfig((q.shape[0], num_heads, 1), BLOCK)
            heads = (num_heads, num_kv_heads, head_dim)
            self.device.launch(PAGED_ATTENTION, (dtype,), config, *inputs, out, num_seqs, *heads, *cache, scale_log2)
            return

        if metadata.max_seqlen_q > 1:
            self.device.launch(
                PAGED_ATTENTION_PREFILL,
                (dtype, *shape.prefill_template),
                prefill_config(shape, q.shape[0], num_seqs, num_heads, num_kv_heads),
                *inputs,
                out,
                num_seqs,
                num_heads,
                num_kv_heads,
                *cache,
                scale_log2,
            )

        splits = decode_splits(metadata.max_context_len, window, self._max_splits)
        partial_out = partial_lse = 0
        if splits > 1:
            memory = self._partial_memory(partial_bytes(num_seqs, num_heads, head_dim, splits))
            partial_out = memory.pointer
            partial_lse = partial_out + num_seqs * num_heads * splits * head_dim * float32.itemsize
        split = (MIN_SPLIT_KEYS, self._max_splits)
        self.device.launch(
            PAGED_ATTENTION_DECODE,
            (dtype, *shape.decode_template),
            decode_config(shape, num_seqs, num_heads, num_kv_heads, splits),
            *inputs,
            out,
            partial_out,
            partial_lse,
            q.shape[0],
            num_seqs,
            num_heads,
            num_kv_heads,
            *cache,
            *split,
            scale_log2,
        )
        if splits > 1:
            self.device.launch(
                PAGED_ATTENTION_COMBINE,
                (dtype,),
                combine_config(num_seqs, num_heads),
                partial_out,
                partial_lse,
                metadata.cu_seqlens_q,
                metadata.context_lens,
                out,
                head_dim,
                splits,
                window,
                *split,
            )


def _aligned(nbytes: int, *tensors: Tensor | None) -> bool:
    return all(tensor.pointer % nbytes == 0 for tensor in tensors if tensor is not None)
