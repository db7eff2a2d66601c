"""Attention of rows with two or more queries with TMA and wgmma of sm_90a.

Where a step has few tiles of queries for the device's multiprocessors, the keys of rows with 1024 or more in sight are
split, into as many parts as there is room for: the last bits of such a row depend on what else is in the step, and on
how its prompt is cut into chunks. The same step gives the same bits every time. Attention in order splits no keys.

Over a cache of e4m3 queries are rounded to e4m3 too, each with a scale, where heads are of 128 elements: their products
with keys take half the time. In order, and under a soft cap, they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import (
    MAP_BYTES,
    Float32,
    InCached,
    InFloat,
    InInt,
    InT,
    Int32,
    OutFloat,
    OutT,
    OutUint,
    TensorMap,
)
from tessera.engine.cuda.tensor_map import SWIZZLE_BYTES, SWIZZLE_REPEAT, SWIZZLE_ROWS, row_groups_map
from tessera.engine.ops.cuda.attention.memory import AttentionMemory, PrefillSplits
from tessera.engine.ops.cuda.attention.problem import (
    ATTENTION,
    CAPPED_HEAD_DIMS,
    AttentionOperands,
    AttentionProblem,
    for_e4m3,
)
from tessera.engine.ops.cuda.attention.widen import TILE_KEYS, launch_widening
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.types import E4M3, HALF_BYTES, WARPGROUP_SIZE, ceil_div
from tessera.engine.tensor import float16, float32


class Sm90PagedAttentionPrefillParams(NamedTuple):
    key_map: TensorMap
    value_map: TensorMap
    q: InT
    block_tables: InInt
    table_rows: InInt
    cu_seqlens_q: InInt
    context_lens: InInt
    out: OutT
    partial_out: OutFloat
    partial_sums: OutFloat
    arrivals: OutUint
    sinks: InT
    num_seqs: Int32
    num_heads: Int32
    num_kv_heads: Int32
    block_size: Int32
    piece: Int32
    block_table_width: Int32
    sliding_window: Int32
    heads_at_once: Int32
    scale_log2: Float32
    cap_scale: Float32
    key_cache: InCached
    value_cache: InCached
    kv_scales: InFloat
    first_tiles: InInt


SM90_PREFILL = KernelSpec(
    file="attention/sm90_prefill.cu",
    name="sm90_paged_attention_prefill_kernel",
    template=("T", "Cached", "HEAD_DIM", "CONSUMERS", "STAGES", "IN_ORDER", "SINKS", "CAPPED", "CODES"),
    params=Sm90PagedAttentionPrefillParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
)
# The same function, with IN_ORDER, and with SINKS or CAPPED.
SM90_PREFILL_IN_ORDER = replace(SM90_PREFILL, batch_invariant=True)
SM90_SINK_PREFILL = replace(SM90_PREFILL, on_demand=True)
SM90_SINK_PREFILL_IN_ORDER = replace(SM90_PREFILL_IN_ORDER, on_demand=True)
SM90_CAPPED_PREFILL = replace(SM90_PREFILL, on_demand=True)
SM90_CAPPED_PREFILL_IN_ORDER = replace(SM90_PREFILL_IN_ORDER, on_demand=True)
WITH_SINKS = (SM90_SINK_PREFILL, SM90_SINK_PREFILL_IN_ORDER)
CAPPED = (SM90_CAPPED_PREFILL, SM90_CAPPED_PREFILL_IN_ORDER)
OF_E4M3 = for_e4m3(SM90_PREFILL, SM90_PREFILL_IN_ORDER, *WITH_SINKS, *CAPPED)
SPECS = (*OF_E4M3, *OF_E4M3.values())

GROUP_ROWS = Constant(64, "of queries that a warp group holds")
MIN_SPLIT_TILES = Constant(4, "of keys: fewer are not worth being merged")
MAX_SPLITS = Constant(16, "of a tile of queries: one warp group merges them, one after the other")
declare_header(
    "sm90_prefill",
    __name__,
    {
        "GROUP_ROWS": GROUP_ROWS,
        "TILE_KEYS": TILE_KEYS,
        "MIN_SPLIT_TILES": MIN_SPLIT_TILES,
        "MAX_SPLITS": MAX_SPLITS,
    },
    (Sm90PagedAttentionPrefillParams,),
)

SINK_HEAD_DIMS = (64,)  # gpt-oss's
MIN_PIECE = SWIZZLE_ROWS  # keys
NO_MAP = bytes(MAP_BYTES)
NEAR_BYTES = 40 << 20  # of keys and values: what the L2 keeps while tiles of queries pass over them


@dataclass(frozen=True)
class Sm90Shape:
    """How the kernel treats one head size."""

    head_dim: int
    consumers: int  # groups of four warps, 64 rows each
    stages: int

    @property
    def tile_rows(self) -> int:
        return GROUP_ROWS * self.consumers

    def by_codes(self, *, e4m3: bool, in_order: bool, capped: bool) -> bool:
        """Whether queries meet keys as e4m3."""
        return e4m3 and self.head_dim == SWIZZLE_BYTES and not in_order and not capped

    def template(self, *, e4m3: bool, in_order: bool, sinks: bool = False, capped: bool = False) -> tuple[str, ...]:
        flags = in_order, sinks, capped, self.by_codes(e4m3=e4m3, in_order=in_order, capped=capped)
        words = ("true" if flag else "false" for flag in flags)
        return (str(self.head_dim), str(self.consumers), str(self.stages), *words)


SHAPES = {
    shape.head_dim: shape for shape in (Sm90Shape(64, consumers=3, stages=2), Sm90Shape(128, consumers=2, stages=2))
}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    pairs = [
        (spec, shape)
        for spec in OF_E4M3
        for shape in SHAPES.values()
        if shape.head_dim in SINK_HEAD_DIMS or spec not in WITH_SINKS
        if shape.head_dim in CAPPED_HEAD_DIMS or spec not in CAPPED
    ]

    def of(dtype: str, e4m3: bool) -> Iterator[Instantiation]:
        for spec, shape in pairs:
            flags = {"in_order": spec.batch_invariant, "sinks": spec in WITH_SINKS, "capped": spec in CAPPED}
            template = shape.template(e4m3=e4m3, **flags)
            yield OF_E4M3[spec] if e4m3 else spec, (dtype, E4M3 if e4m3 else dtype, *template)

    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [found for e4m3 in (False, True) for dtype in halves for found in of(dtype, e4m3)]


def runs(device: CudaDevice, head_dim: int, block_size: int = MIN_PIECE) -> bool:
    """Whether the kernel runs on this device for heads of this size, in blocks of this size."""
    return head_dim in SHAPES and block_size % MIN_PIECE == 0 and SM90_PREFILL.supports(device.arch)


def splits_of(memory: AttentionMemory) -> PrefillSplits:
    """Enough for any launch on a device, of any head size."""
    block_floats = max(shape.tile_rows * (shape.head_dim + 2) for shape in SHAPES.values())
    return memory.prefill_splits(block_floats, max(shape.consumers for shape in SHAPES.values()))


def split_pointers(splits: PrefillSplits, shape: Sm90Shape, num_blocks: int) -> tuple[int, int, int]:
    """Addresses of outputs, of maxima and sums, and of counters, for a launch of `num_blocks`."""
    outputs = splits.partials.pointer
    sums = outputs + num_blocks * shape.tile_rows * shape.head_dim * float32.itemsize
    return outputs, sums, splits.arrivals.pointer


def most_splits(num_keys: int) -> int:
    """The most parts that the keys of a tile are split into if its row has up to `num_keys` in sight."""
    if num_keys < 2 * MIN_SPLIT_TILES * TILE_KEYS:
        return 1
    tiles = ceil_div(num_keys, TILE_KEYS) + 1  # a window may begin and end within a tile
    return min(tiles // MIN_SPLIT_TILES, MAX_SPLITS)


def prefill_config(
    shape: Sm90Shape, num_units: int, multiprocessors: int, *, e4m3: bool = False, by_codes: bool = False
) -> LaunchConfig:
    """A block for each multiprocessor, or for each of at most `num_units` splits of tiles if they are fewer."""
    rows = 2 * (shape.tile_rows + shape.stages * TILE_KEYS)
    shared_bytes = rows * shape.head_dim * HALF_BYTES + SWIZZLE_REPEAT
    if e4m3:  # codes of two tiles that are to be widened
        shared_bytes += 2 * TILE_KEYS * shape.head_dim
    if by_codes:  # keys
        shared_bytes -= shape.stages * TILE_KEYS * shape.head_dim
    grid = (min(multiprocessors, num_units), 1, 1)
    return LaunchConfig(grid, (WARPGROUP_SIZE * (shape.consumers + 1), 1, 1), shared_bytes)


def most_tiles(shape: Sm90Shape, num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int) -> int:
    """Tiles that `num_tokens` can make however they are divided into rows: each row's last may be partial."""
    per_head = num_tokens * (num_heads // num_kv_heads) // shape.tile_rows + min(num_seqs, num_tokens)
    return per_head * num_kv_heads


def heads_at_once(num_keys: int, num_kv_heads: int, key_and_value_bytes: int) -> int:
    """Heads whose keys and values are read at the same time; those of all together may not stay in the L2."""
    head_bytes = max(num_keys, 1) * key_and_value_bytes
    parts = ceil_div(num_kv_heads, max(NEAR_BYTES // head_bytes, 1))
    return ceil_div(num_kv_heads, parts)


def _accepts(problem: AttentionProblem, device: CudaDevice) -> Sm90Shape | None:
    if problem.rows != "prompts" or problem.dtype == "float" or not problem.is_aligned:
        return None
    if problem.capped and problem.head_dim not in CAPPED_HEAD_DIMS:
        return None
    if problem.has_sinks and problem.head_dim not in SINK_HEAD_DIMS:
        return None
    return SHAPES[problem.head_dim] if runs(device, problem.head_dim, problem.block_size) else None


def _launch(device: CudaDevice, problem: AttentionProblem, shape: Sm90Shape, operands: AttentionOperands) -> None:
    q, metadata = operands.q, operands.metadata
    num_blocks, num_kv_heads, block_size, head_dim = operands.key_cache.shape
    num_seqs, num_heads = metadata.table_rows.shape[0], operands.num_heads
    piece = math.gcd(block_size, TILE_KEYS)
    rows = num_blocks * num_kv_heads * block_size
    num_keys = min(metadata.max_context_len, metadata.max_seqlen_q + operands.window)
    num_units = most_tiles(shape, q.shape[0], num_seqs, num_heads, num_kv_heads)
    if not problem.in_order:
        num_units *= most_splits(num_keys)
    e4m3 = problem.cached == E4M3
    by_codes = shape.by_codes(e4m3=e4m3, in_order=problem.in_order, capped=problem.capped)
    config = prefill_config(shape, num_units, device.multiprocessors, e4m3=e4m3, by_codes=by_codes)
    partial_out, partial_sums, arrivals = split_pointers(splits_of(operands.memory), shape, config.grid[0])
    widened = launch_widening(device, operands, with_keys=not by_codes) if e4m3 else None
    key_map, value_map = NO_MAP, NO_MAP
    key_bytes = value_bytes = operands.key_cache.dtype.itemsize * head_dim
    if widened is not None:
        widened_rows = widened.capacity * num_kv_heads * TILE_KEYS
        value_bytes = HALF_BYTES * head_dim
        value_map = row_groups_map(widened.values, float16, widened_rows, head_dim, TILE_KEYS)
        if widened.keys is not None:
            key_bytes = value_bytes
            key_map = row_groups_map(widened.keys, float16, widened_rows, head_dim, TILE_KEYS)
    if by_codes:  # two of them are an element
        key_map = row_groups_map(operands.key_cache.pointer, float16, rows, head_dim // HALF_BYTES, piece)
    elif not e4m3:
        key_map, value_map = (
            row_groups_map(cache.pointer, q.dtype, rows, head_dim, piece)
            for cache in (operands.key_cache, operands.value_cache)
        )
    params = Sm90PagedAttentionPrefillParams(
        key_map=key_map,
        value_map=value_map,
        q=q,
        block_tables=metadata.block_tables,
        table_rows=metadata.table_rows,
        cu_seqlens_q=metadata.cu_seqlens_q,
        context_lens=metadata.context_lens,
        out=operands.out,
        partial_out=partial_out,
        partial_sums=partial_sums,
        arrivals=arrivals,
        sinks=operands.sinks,
        num_seqs=num_seqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        piece=piece,
        block_table_width=metadata.block_tables.shape[1],
        sliding_window=operands.window,
        heads_at_once=heads_at_once(num_keys, num_kv_heads, key_bytes + value_bytes),
        scale_log2=operands.cap_log2 if problem.capped else operands.scale_log2,
        cap_scale=operands.scale_log2 if problem.capped else 0.0,
        key_cache=operands.key_cache,
        value_cache=operands.value_cache,
        kv_scales=operands.kv_scales,
        first_tiles=None if widened is None else widened.first_tiles,
    )
    in_order, sinks, capped = problem.in_order, problem.has_sinks, problem.capped
    spec = SM90_PREFILL_IN_ORDER if in_order else SM90_PREFILL
    if sinks:
        spec = SM90_SINK_PREFILL_IN_ORDER if in_order else SM90_SINK_PREFILL
    elif capped:
        spec = SM90_CAPPED_PREFILL_IN_ORDER if in_order else SM90_CAPPED_PREFILL
    template = shape.template(e4m3=e4m3, in_order=in_order, sinks=sinks, capped=capped)
    device.launch(OF_E4M3[spec] if e4m3 else spec, (problem.dtype, problem.cached, *template), config, params)


ATTENTION.register(Candidate("sm90_prefill", SPECS, _accepts, _launch, order=1))
