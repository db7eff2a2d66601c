"""Rotary embeddings with the KV store, and attention over the paged cache.

16-bit dtypes with one of `HEAD_DIMS` run on tensor cores: rows with one query in the decode kernel,
rows with more in the prefill kernel. Everything else runs in a general kernel. A step in which no row
has more than one query is one kernel altogether. A row's result depends on nothing but the row: the decode
kernel divides a context by its own length alone, and how many blocks share the parts decides who computes
them, not what. There are exceptions, in which the last bits depend on what else is in the step; the same
step gives the same bits every time:
- a row that is a step by itself is divided into smaller parts (sm_90 and later), and 33 rows or more of 8
  key/value heads of size 128 are computed by narrower blocks;
- a row with more than one query and 1024 keys or more in sight, on sm_90a: where a step has few tiles of
  queries for the device's multiprocessors, their keys are split, into as many parts as there is room for, so
  that it also matters how a prompt is cut into chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import (
    Float32,
    InFloat,
    InInt,
    InT,
    Int32,
    OutT,
    RestrictInInt,
    RestrictInT,
    RestrictOutT,
)
from tessera.engine.ops.cuda import attention_decode
from tessera.engine.ops.cuda.attention_decode import UNIT_KEYS, DecodeAttentionOps
from tessera.engine.ops.cuda.sm90_attention_prefill import SplitMemory, accepts, launch_prefill
from tessera.engine.ops.cuda.types import HALF_BYTES, SEGMENT, WARP_SIZE, aligned, ceil_div, cuda_type
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import Tensor, float32


class RopeAndStoreParams(NamedTuple):
    qkv: InT
    q_norm: InT
    k_norm: InT
    cos_sin: InFloat
    positions: InInt
    slot_mapping: InInt
    key_cache: OutT
    value_cache: OutT
    out: OutT
    num_heads: Int32
    num_kv_heads: Int32
    part_heads: Int32
    head_dim: Int32
    rotary_dim: Int32
    block_size: Int32
    eps: Float32


class PagedAttentionParams(NamedTuple):
    q: RestrictInT
    key_cache: RestrictInT
    value_cache: RestrictInT
    block_tables: RestrictInInt
    table_rows: RestrictInInt
    cu_seqlens_q: RestrictInInt
    context_lens: RestrictInInt
    out: RestrictOutT
    num_seqs: Int32
    num_heads: Int32
    num_kv_heads: Int32
    head_dim: Int32
    block_size: Int32
    block_table_width: Int32
    sliding_window: Int32
    scale_log2: Float32


class PagedAttentionPrefillParams(NamedTuple):
    q: RestrictInT
    key_cache: RestrictInT
    value_cache: RestrictInT
    block_tables: RestrictInInt
    table_rows: RestrictInInt
    cu_seqlens_q: RestrictInInt
    context_lens: RestrictInInt
    out: RestrictOutT
    num_seqs: Int32
    num_heads: Int32
    num_kv_heads: Int32
    block_size: Int32
    block_table_width: Int32
    sliding_window: Int32
    scale_log2: Float32


ROPE_AND_STORE = KernelSpec(
    file="attention/rope.cu",
    name="rope_and_store_kernel",
    template=("T", "VECTOR", "MAX_HEAD_DIM"),
    params=RopeAndStoreParams,
    overlaps=True,
)
PAGED_ATTENTION = KernelSpec(
    file="attention/attention.cu",
    name="paged_attention_kernel",
    template=("T",),
    params=PagedAttentionParams,
)
PAGED_ATTENTION_PREFILL = KernelSpec(
    file="attention/prefill.cu",
    name="paged_attention_prefill_kernel",
    template=("T", "HEAD_DIM", "ROW_TILES", "TILE_KEYS"),
    params=PagedAttentionPrefillParams,
)
SPECS = (
    *attention_decode.SPECS,
    ROPE_AND_STORE,
    PAGED_ATTENTION,
    PAGED_ATTENTION_PREFILL,
)

WARPS = Constant(4, "of a block")
MAX_HEAD_DIM = Constant(256)
declare_header("rope", __name__, {"WARPS": WARPS}, (RopeAndStoreParams,))
declare_header("attention", __name__, {"WARPS": WARPS, "MAX_HEAD_DIM": MAX_HEAD_DIM}, (PagedAttentionParams,))
declare_header("prefill", __name__, {"WARPS": WARPS}, (PagedAttentionPrefillParams,))

BLOCK = (WARPS * WARP_SIZE, 1, 1)
ROPE_PARTS = (1, 2, 4, 8)  # heads of a warp
ROPE_MOST_WARPS = 8192  # with more, each takes more heads
ROPE_HEAD_DIMS = (128, MAX_HEAD_DIM)  # up to which a head has an instantiation
NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class HeadShape:
    """How the tensor-core kernels treat one head size."""

    head_dim: int
    row_tiles: int  # of 16 rows that a prefill warp holds
    tile_keys: int

    @property
    def tile_rows(self) -> int:
        return 64 * self.row_tiles

    @property
    def prefill_template(self) -> tuple[str, ...]:
        return (str(self.head_dim), str(self.row_tiles), str(self.tile_keys))


HEAD_SHAPES = {
    shape.head_dim: shape
    for shape in (
        HeadShape(64, row_tiles=2, tile_keys=64),
        HeadShape(96, row_tiles=2, tile_keys=64),
        HeadShape(128, row_tiles=2, tile_keys=64),
        HeadShape(256, row_tiles=1, tile_keys=32),
    )
}
HEAD_DIMS = tuple(HEAD_SHAPES)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    pairs: list[Instantiation] = []
    for dtype in dtypes:
        pairs += [(ROPE_AND_STORE, (dtype, vector, str(dim))) for vector in ("1", "2") for dim in ROPE_HEAD_DIMS]
        pairs.append((PAGED_ATTENTION, (dtype,)))
        if dtype != "float":
            for shape in HEAD_SHAPES.values():
                pairs.append((PAGED_ATTENTION_PREFILL, (dtype, *shape.prefill_template)))
    return pairs + attention_decode.instantiations(dtypes)


def rope_part_heads(num_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Heads that a warp takes one after another: one while there are few, so that these are soon done."""
    heads = num_tokens * (num_heads + 2 * num_kv_heads)
    return next((part for part in ROPE_PARTS if heads <= part * ROPE_MOST_WARPS), ROPE_PARTS[-1])


def rope_config(num_tokens: int, num_heads: int, num_kv_heads: int, part_heads: int) -> LaunchConfig:
    """A warp for up to `part_heads` heads of a kind of a token."""
    parts = ceil_div(num_heads, part_heads) + 2 * ceil_div(num_kv_heads, part_heads)
    return LaunchConfig((num_tokens, ceil_div(parts, WARPS), 1), BLOCK)


def prefill_config(shape: HeadShape, num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int) -> LaunchConfig:
    """As many tiles as `num_tokens` can make however they are divided into rows: each row's last may be partial."""
    group = num_heads // num_kv_heads
    tiles = num_tokens * group // shape.tile_rows + min(num_seqs, num_tokens)
    pitch = (shape.head_dim + SEGMENT) * HALF_BYTES
    shared_bytes = (shape.tile_rows + 2 * shape.tile_keys) * pitch + 8 * shape.tile_keys
    return LaunchConfig((tiles, num_kv_heads, 1), BLOCK, shared_bytes)


class AttentionOps(DecodeAttentionOps):
    hopper_prefill: bool = True  # False: rows with two or more queries never take the kernel of sm_90a
    _split_memory: SplitMemory | None = None

    def reserve_attention(self, max_num_seqs: int, num_heads: int, head_dim: int) -> None:
        """As for decodes, and what the splits of a prefill's keys need on sm_90a."""
        super().reserve_attention(max_num_seqs, num_heads, head_dim)
        if accepts(self.device, head_dim):
            self._prefill_memory()

    def _prefill_memory(self) -> SplitMemory:
        """Allocated once: recorded steps keep its addresses."""
        if self._split_memory is None:
            assert not self.device.is_capturing, "reserve_attention comes before a recording: counters are cleared once"
            self._split_memory = SplitMemory.allocate(self.device)
        return self._split_memory

    def _rope_and_store(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        num_heads: int,
        out: Tensor,
    ) -> None:
        cos_sin, q_norm, k_norm, eps = transform
        _, num_kv_heads, block_size, head_dim = key_cache.shape
        rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
        if head_dim > MAX_HEAD_DIM:
            raise _head_too_large(head_dim)
        pairs = _rotates_pairs(head_dim, cos_sin, qkv, q_norm, k_norm, key_cache, value_cache, out)
        largest = next(dim for dim in ROPE_HEAD_DIMS if dim >= head_dim)
        num_tokens = qkv.shape[0]
        part_heads = rope_part_heads(num_tokens, num_heads, num_kv_heads)
        self.device.launch(
            ROPE_AND_STORE,
            (cuda_type(qkv.dtype), "2" if pairs else "1", str(largest)),
            rope_config(num_tokens, num_heads, num_kv_heads, part_heads),
            RopeAndStoreParams(
                qkv=qkv,
                q_norm=q_norm,
                k_norm=k_norm,
                cos_sin=cos_sin,
                positions=metadata.positions,
                slot_mapping=metadata.slot_mapping,
                key_cache=key_cache,
                value_cache=value_cache,
                out=out,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                part_heads=part_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                block_size=block_size,
                eps=eps,
            ),
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
            raise _head_too_large(head_dim)
        num_heads = q.shape[1] // head_dim
        num_seqs, block_table_width = metadata.table_rows.shape[0], metadata.block_tables.shape[1]
        scale_log2, window = _kernel_scale(scale), _kernel_window(sliding_window)
        dtype = cuda_type(q.dtype)

        shape = HEAD_SHAPES.get(head_dim)
        tiled = aligned(16, q, key_cache, value_cache, out) and block_size % UNIT_KEYS == 0
        if shape is None or q.dtype == float32 or not tiled:
            params = PagedAttentionParams(
                q=q,
                key_cache=key_cache,
                value_cache=value_cache,
                block_tables=metadata.block_tables,
                table_rows=metadata.table_rows,
                cu_seqlens_q=metadata.cu_seqlens_q,
                context_lens=metadata.context_lens,
                out=out,
                num_seqs=num_seqs,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                block_table_width=block_table_width,
                sliding_window=window,
                scale_log2=scale_log2,
            )
            config = LaunchConfig((q.shape[0], num_heads, 1), BLOCK)
            self.device.launch(PAGED_ATTENTION, (dtype,), config, params)
            return

        hopper = metadata.max_seqlen_q > 1 and self.hopper_prefill and accepts(self.device, head_dim, block_size)
        if hopper:
            prefill = (q, key_cache, value_cache, metadata, window, scale_log2, out)
            launch_prefill(self.device, *prefill, self._prefill_memory())
        elif metadata.max_seqlen_q > 1:
            self.device.launch(
                PAGED_ATTENTION_PREFILL,
                (dtype, *shape.prefill_template),
                prefill_config(shape, q.shape[0], num_seqs, num_heads, num_kv_heads),
                PagedAttentionPrefillParams(
                    q=q,
                    key_cache=key_cache,
                    value_cache=value_cache,
                    block_tables=metadata.block_tables,
                    table_rows=metadata.table_rows,
                    cu_seqlens_q=metadata.cu_seqlens_q,
                    context_lens=metadata.context_lens,
                    out=out,
                    num_seqs=num_seqs,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    block_size=block_size,
                    block_table_width=block_table_width,
                    sliding_window=window,
                    scale_log2=scale_log2,
                ),
            )

        decode = (q, key_cache, value_cache, metadata, num_heads, scale_log2, window, out, None)
        self._decode(*decode, beside_prefill=hopper)

    def _attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        transform: HeadTransform,
        num_heads: int,
        scale: float,
        sliding_window: int | None,
        queries: Tensor,
        out: Tensor,
    ) -> None:
        cos_sin, q_norm, k_norm, _ = transform
        if (
            metadata.max_seqlen_q > 1
            or key_cache.shape[3] not in HEAD_SHAPES
            or qkv.dtype == float32
            or key_cache.shape[2] % UNIT_KEYS > 0
            or not aligned(16, qkv, key_cache, value_cache, out)
            or not _rotates_pairs(key_cache.shape[3], cos_sin, q_norm, k_norm)
        ):
            inputs = (qkv, key_cache, value_cache, metadata, transform)
            super()._attention(*inputs, num_heads, scale, sliding_window, queries, out)
            return
        scale_log2, window = _kernel_scale(scale), _kernel_window(sliding_window)
        self._decode(qkv, key_cache, value_cache, metadata, num_heads, scale_log2, window, out, transform)


def _head_too_large(head_dim: int) -> TesseraError:
    return TesseraError(f"attention on CUDA takes heads of up to {MAX_HEAD_DIM} elements, not {head_dim}")


def _kernel_scale(scale: float) -> float:
    """The kernels compute powers of 2."""
    assert scale > 0, "the kernels find the maximum before they scale"
    return scale * math.log2(math.e)


def _kernel_window(sliding_window: int | None) -> int:
    return NO_WINDOW if sliding_window is None else min(sliding_window, NO_WINDOW)


def _rotates_pairs(head_dim: int, cos_sin: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether norms and rotation may take two elements at a time."""
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    sizes = [2 * tensor.dtype.itemsize for tensor in tensors if tensor is not None]
    in_pairs = aligned(max(sizes, default=1), *tensors) and aligned(2 * float32.itemsize, cos_sin)
    return head_dim % 2 == 0 and rotary_dim % 4 == 0 and in_pairs
