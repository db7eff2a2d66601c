"""Keys and values of a cache of e4m3, widened once for all tiles of queries that read them.

Attention of prompts on sm_90a can widen codes itself, but does so for every tile of queries. Rows with many queries and
keys are widened in front of it, as far as there is room for them; the results are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InCached, InInt, Int32, OutInt, Pointer
from tessera.engine.ops.cuda.attention.memory import AttentionMemory
from tessera.engine.ops.cuda.attention.problem import AttentionOperands
from tessera.engine.ops.cuda.types import E4M3, HALF_BYTES, ceil_div
from tessera.engine.tensor import Tensor, empty, float16, int32

OutHalf = Annotated[Pointer, "__half*"]


class WidenCacheParams(NamedTuple):
    key_cache: InCached
    value_cache: InCached
    block_tables: InInt
    table_rows: InInt
    cu_seqlens_q: InInt
    context_lens: InInt
    keys: OutHalf
    values: OutHalf
    first_tiles: OutInt
    num_seqs: Int32
    num_kv_heads: Int32
    block_size: Int32
    block_table_width: Int32
    sliding_window: Int32
    min_queries: Int32
    min_keys: Int32
    capacity: Int32


WIDEN_CACHE = KernelSpec(
    file="attention/widen_cache.cu",
    name="widen_cache_kernel",
    template=("Cached", "HEAD_DIM"),
    params=WidenCacheParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
)
SPECS = (WIDEN_CACHE,)

THREADS = Constant(256)
TILE_KEYS = Constant(128)
declare_header("widen_cache", __name__, {"THREADS": THREADS, "TILE_KEYS": TILE_KEYS}, (WidenCacheParams,))

HEAD_DIMS = (64, 128)
BLOCKS = 6  # of a multiprocessor
WIDENED_BYTES = 256 << 20  # for keys and values: 65,536 tokens of 8 heads of 128
MAX_ROWS = 1 << 14
# A tile of 128 rows of queries of a head saves about a third of what widening takes; and the kernel is to be worth its
# launch. Steps with fewer tokens do not launch it.
MIN_STEP_TOKENS = 512
MIN_QUERY_ROWS = 1024  # of a key/value head
MIN_KEYS = 1024


@dataclass(frozen=True)
class WidenedCache:
    """Memory of widened keys and values.

    Attributes:
        halves: float16, keys, then values, or values alone.
        first_tiles: [MAX_ROWS] int32, where in it rows begin.
    """

    halves: Tensor
    first_tiles: Tensor

    @classmethod
    def allocate(cls, device: CudaDevice) -> WidenedCache:
        """Raises: OutOfMemoryError."""
        halves = empty((WIDENED_BYTES // HALF_BYTES,), float16, device)
        return cls(halves, empty((MAX_ROWS,), int32, device))

    def of(self, num_kv_heads: int, head_dim: int, *, with_keys: bool) -> WidenedTiles:
        """Its tiles for heads of this size."""
        first, kinds = self.halves.pointer, 2 if with_keys else 1
        capacity = self.halves.size // kinds // (num_kv_heads * TILE_KEYS * head_dim)
        values = first + self.halves.nbytes // 2 if with_keys else first
        return WidenedTiles(first if with_keys else None, values, self.first_tiles, capacity)


class WidenedTiles(NamedTuple):
    """Addresses of keys, or None where they stay as they are, and of values, `capacity` tiles of all heads each."""

    keys: int | None
    values: int
    first_tiles: Tensor
    capacity: int


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched beside activations of these C types."""
    return [(WIDEN_CACHE, (E4M3, str(dim))) for dim in HEAD_DIMS if set(dtypes) - {"float"}]


def widened_cache_of(memory: AttentionMemory) -> WidenedCache | None:
    """For any launch on a device; what does not fit is not widened. None if it has not been reserved for a capture."""
    return memory.shared(WidenedCache, WidenedCache.allocate)


def launch_widening(device: CudaDevice, operands: AttentionOperands, *, with_keys: bool) -> WidenedTiles | None:
    """Widen what pays, or the values of it alone; None, and nothing is launched, where no row of the step can."""
    metadata = operands.metadata
    num_seqs, num_tokens = metadata.table_rows.shape[0], operands.q.shape[0]
    _, num_kv_heads, block_size, head_dim = operands.key_cache.shape
    min_queries = ceil_div(MIN_QUERY_ROWS * num_kv_heads, operands.num_heads)
    if num_tokens < max(MIN_STEP_TOKENS, min_queries) or metadata.max_context_len < MIN_KEYS or num_seqs > MAX_ROWS:
        return None
    memory = widened_cache_of(operands.memory)
    if memory is None:
        return None
    widened = memory.of(num_kv_heads, head_dim, with_keys=with_keys)
    params = WidenCacheParams(
        key_cache=operands.key_cache,
        value_cache=operands.value_cache,
        block_tables=metadata.block_tables,
        table_rows=metadata.table_rows,
        cu_seqlens_q=metadata.cu_seqlens_q,
        context_lens=metadata.context_lens,
        keys=widened.keys,
        values=widened.values,
        first_tiles=widened.first_tiles,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        block_table_width=metadata.block_tables.shape[1],
        sliding_window=operands.window,
        min_queries=min_queries,
        min_keys=MIN_KEYS,
        capacity=widened.capacity,
    )
    parts = (2 if with_keys else 1) * num_kv_heads  # of a tile
    blocks = min(device.multiprocessors * BLOCKS, widened.capacity * parts)
    config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1))
    device.launch(WIDEN_CACHE, (E4M3, str(head_dim)), config, params)
    return widened
