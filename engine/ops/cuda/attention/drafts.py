"""Attention of rows with a token and its draft on tensor cores: keys are read once for the queries of a row.

Each query's keys are divided, and added, as decode attention does for several rows that have one query each
(`decode`); how many queries, tiles and blocks there are decides which block computes what, and changes no bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutCached, OutFloat, OutT, OutUint
from tessera.engine.ops.cuda.attention.decode import (
    DECODE_SHAPES,
    MERGED_FLOATS,
    SENT_FLOATS,
    accepts_keys,
    head_groups,
    query_heads,
    ring_bytes,
)
from tessera.engine.ops.cuda.attention.division import IN_ORDER_SPLIT_KEYS, IN_ORDER_SPLITS
from tessera.engine.ops.cuda.attention.problem import (
    ATTENTION,
    CAPPED_HEAD_DIMS,
    AttentionOperands,
    AttentionProblem,
    for_e4m3,
)
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.types import E4M3, HALF_BYTES, MAX_CACHED_CONFIGS, SEGMENT, WARP_SIZE, ceil_div
from tessera.engine.tensor import float32


class PagedAttentionDraftsParams(NamedTuple):
    q: InT
    key_cache: OutCached
    value_cache: OutCached
    block_tables: InInt
    table_rows: InInt
    cu_seqlens_q: InInt
    context_lens: InInt
    out: OutT
    partial_out: OutFloat
    partial_sums: OutFloat
    arrivals: OutUint
    num_tokens: Int32
    num_seqs: Int32
    num_groups: Int32
    group: Int32
    num_kv_heads: Int32
    head_rows_log2: Int32
    block_size: Int32
    block_table_width: Int32
    sliding_window: Int32
    min_split_keys: Int32
    max_splits: Int32
    most_parts: Int32
    scale_log2: Float32
    cap_log2: Float32
    sinks: InT
    kv_scales: InFloat


# Launched by engines that verify drafts alone.
PAGED_ATTENTION_DRAFTS = KernelSpec(
    file="attention/drafts.cu",
    name="paged_attention_drafts_kernel",
    template=("T", "Cached", "HEAD_DIM", "WARPS", "STAGES", "ROW_TILES", "CAPPED", "SINKS"),
    params=PagedAttentionDraftsParams,
    overlaps=True,
    on_demand=True,
)
# The same function, with CAPPED or SINKS.
CAPPED_DRAFTS = replace(PAGED_ATTENTION_DRAFTS)
SINK_DRAFTS = replace(PAGED_ATTENTION_DRAFTS)
FLAGS = {
    PAGED_ATTENTION_DRAFTS: ("false", "false"),
    CAPPED_DRAFTS: ("true", "false"),
    SINK_DRAFTS: ("false", "true"),
}
OF_E4M3 = for_e4m3(*FLAGS)
SPECS = (*OF_E4M3, *OF_E4M3.values())
declare_header("drafts", __name__, params=(PagedAttentionDraftsParams,))

TILE_ROWS = 16  # of queries: what an mma takes
ROW_TILES = {64: (1, 2), 80: (1, 2), 96: (1, 2), 128: (1, 2), 256: (1,)}  # of a block, by head size
STATIC_BYTES = 640  # of shared memory: maxima and sums of a tile by warps, and a flag, aligned
FEW_BLOCKS = 64  # that do not fill a device: tiles of 16 rows for more of them
FULL_BLOCKS = 256  # beyond which a row's keys are not divided among more of them


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched here for elements of these C types."""
    pairs = [
        (spec, (str(head_dim), str(shape.warps), str(shape.stages), str(row_tiles), *flags))
        for spec, flags in FLAGS.items()
        for head_dim, shape in DECODE_SHAPES.items()
        for row_tiles in ROW_TILES[head_dim]
        if head_dim in CAPPED_HEAD_DIMS or spec is not CAPPED_DRAFTS
    ]
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [
        *((spec, (dtype, dtype, *template)) for dtype in halves for spec, template in pairs),
        *((OF_E4M3[spec], (dtype, E4M3, *template)) for dtype in halves for spec, template in pairs),
    ]


def head_rows_log2(num_heads: int, num_kv_heads: int) -> int:
    """Of the rows that a query takes in a tile for its heads of one group, a power of two."""
    return (query_heads(num_heads, num_kv_heads) - 1).bit_length()


def shared_bytes(head_dim: int, row_tiles: int, *, e4m3: bool) -> int:
    """Dynamic shared memory of a block."""
    rows = TILE_ROWS * row_tiles
    staged = ring_bytes(DECODE_SHAPES[head_dim], TILE_ROWS, e4m3=e4m3) + rows * (head_dim + SEGMENT) * HALF_BYTES
    return staged + rows * head_dim // MERGED_FLOATS * SENT_FLOATS * float32.itemsize


class DraftPlan(NamedTuple):
    """How a launch divides its work.

    Attributes:
        row_tiles: tiles of queries' heads that a block has.
        config: the launch's.
        most_parts: blocks for all rows, each with a part of a row's keys, for one tile of one group of heads.
    """

    row_tiles: int
    config: LaunchConfig
    most_parts: int


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def plan_drafts(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    num_tokens: int,
    num_seqs: int,
    max_seqlen_q: int,
    max_shared_bytes: int,
    *,
    e4m3: bool = False,
) -> DraftPlan:
    """For `num_tokens` of `num_seqs` rows, some of which may be padding, of up to `max_seqlen_q` queries each."""
    shape, groups = DECODE_SHAPES[head_dim], head_groups(num_heads, num_kv_heads)
    rows = max_seqlen_q << head_rows_log2(num_heads, num_kv_heads)
    least_seqs = ceil_div(num_tokens, max_seqlen_q)
    row_tiles = 1
    if 2 in ROW_TILES[head_dim] and least_seqs * groups * ceil_div(rows, TILE_ROWS) > FEW_BLOCKS and rows > TILE_ROWS:
        row_tiles = 2 if shared_bytes(head_dim, 2, e4m3=e4m3) + STATIC_BYTES <= max_shared_bytes else 1
    tiles = ceil_div(rows, TILE_ROWS * row_tiles)
    most_parts = ceil_div(FULL_BLOCKS, groups * tiles)
    config = LaunchConfig(
        (groups * tiles, max(num_seqs, most_parts), 1),
        (shape.warps * WARP_SIZE, 1, 1),
        shared_bytes(head_dim, row_tiles, e4m3=e4m3),
    )
    return DraftPlan(row_tiles, config, most_parts)


def _accepts(problem: AttentionProblem, device: CudaDevice) -> bool | None:
    return accepts_keys(problem) if problem.rows == "drafts" else None


def _launch(device: CudaDevice, problem: AttentionProblem, plan: object, operands: AttentionOperands) -> None:
    q, metadata, head_dim = operands.q, operands.metadata, problem.head_dim
    num_tokens, num_seqs = q.shape[0], metadata.table_rows.shape[0]
    num_heads, num_kv_heads = operands.num_heads, operands.key_cache.shape[1]
    e4m3 = problem.cached == E4M3
    row_tiles, config, most_parts = plan_drafts(
        head_dim,
        num_heads,
        num_kv_heads,
        num_tokens,
        num_seqs,
        metadata.max_seqlen_q,
        device.max_shared_bytes,
        e4m3=e4m3,
    )
    partial_out, partial_sums, arrivals = operands.memory.decode_pointers(num_tokens, num_heads, head_dim)
    params = PagedAttentionDraftsParams(
        q=q,
        key_cache=operands.key_cache,
        value_cache=operands.value_cache,
        block_tables=metadata.block_tables,
        table_rows=metadata.table_rows,
        cu_seqlens_q=metadata.cu_seqlens_q,
        context_lens=metadata.context_lens,
        out=operands.out,
        partial_out=partial_out,
        partial_sums=partial_sums,
        arrivals=arrivals,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_groups=head_groups(num_heads, num_kv_heads),
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_rows_log2=head_rows_log2(num_heads, num_kv_heads),
        block_size=problem.block_size,
        block_table_width=metadata.block_tables.shape[1],
        sliding_window=operands.window,
        min_split_keys=IN_ORDER_SPLIT_KEYS,
        max_splits=IN_ORDER_SPLITS if problem.in_order else operands.memory.max_splits,
        most_parts=most_parts,
        scale_log2=operands.scale_log2,
        cap_log2=operands.cap_log2,
        sinks=operands.sinks,
        kv_scales=operands.kv_scales,
    )
    spec = PAGED_ATTENTION_DRAFTS
    if problem.capped:
        spec = CAPPED_DRAFTS
    elif problem.has_sinks:
        spec = SINK_DRAFTS
    shape = DECODE_SHAPES[head_dim]
    template = (str(head_dim), str(shape.warps), str(shape.stages), str(row_tiles), *FLAGS[spec])
    device.launch(OF_E4M3[spec] if e4m3 else spec, (problem.dtype, problem.cached, *template), config, params)


ATTENTION.register(Candidate("drafts", SPECS, _accepts, _launch, order=0))
