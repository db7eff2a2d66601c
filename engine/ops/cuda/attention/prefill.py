"""Attention of rows with two or more queries on tensor cores of every architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import (
    Float32,
    InFloat,
    Int32,
    RestrictInCached,
    RestrictInInt,
    RestrictInT,
    RestrictOutT,
)
from tessera.engine.ops.cuda.attention.problem import (
    ATTENTION,
    CAPPED_HEAD_DIMS,
    AttentionOperands,
    AttentionProblem,
    for_e4m3,
)
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.types import E4M3, HALF_BYTES, SEGMENT, WARP_SIZE


class PagedAttentionPrefillParams(NamedTuple):
    q: RestrictInT
    key_cache: RestrictInCached
    value_cache: RestrictInCached
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
    cap_log2: Float32
    sinks: RestrictInT
    kv_scales: InFloat


PAGED_ATTENTION_PREFILL = KernelSpec(
    file="attention/prefill.cu",
    name="paged_attention_prefill_kernel",
    template=("T", "Cached", "HEAD_DIM", "ROW_TILES", "TILE_KEYS", "IN_ORDER", "CAPPED", "SINKS"),
    params=PagedAttentionPrefillParams,
)
# The same function, with IN_ORDER.
PREFILL_IN_ORDER = replace(PAGED_ATTENTION_PREFILL, batch_invariant=True)
# The same functions, with CAPPED or SINKS.
CAPPED_PREFILL = replace(PAGED_ATTENTION_PREFILL, on_demand=True)
CAPPED_PREFILL_IN_ORDER = replace(PREFILL_IN_ORDER, on_demand=True)
SINK_PREFILL = replace(PAGED_ATTENTION_PREFILL, on_demand=True)
SINK_PREFILL_IN_ORDER = replace(PREFILL_IN_ORDER, on_demand=True)
CAPPED = (CAPPED_PREFILL, CAPPED_PREFILL_IN_ORDER)
SINKS = (SINK_PREFILL, SINK_PREFILL_IN_ORDER)
OF_E4M3 = for_e4m3(PAGED_ATTENTION_PREFILL, PREFILL_IN_ORDER, *CAPPED, *SINKS)
SPECS = (*OF_E4M3, *OF_E4M3.values())

WARPS = Constant(4, "of a block")
declare_header("prefill", __name__, {"WARPS": WARPS}, (PagedAttentionPrefillParams,))


@dataclass(frozen=True)
class HeadShape:
    """How the tensor-core kernels treat one head size."""

    head_dim: int
    row_tiles: int  # of 16 rows that a prefill warp holds
    tile_keys: int

    @property
    def tile_rows(self) -> int:
        return 64 * self.row_tiles

    def prefill_template(self, *, in_order: bool, capped: bool = False, sinks: bool = False) -> tuple[str, ...]:
        flags = ("true" if flag else "false" for flag in (in_order, capped, sinks))
        return (str(self.head_dim), str(self.row_tiles), str(self.tile_keys), *flags)


HEAD_SHAPES = {
    shape.head_dim: shape
    for shape in (
        HeadShape(64, row_tiles=2, tile_keys=64),
        HeadShape(80, row_tiles=2, tile_keys=64),
        HeadShape(96, row_tiles=2, tile_keys=64),
        HeadShape(128, row_tiles=2, tile_keys=64),
        HeadShape(256, row_tiles=1, tile_keys=32),
    )
}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    pairs = [
        (spec, shape.prefill_template(in_order=spec.batch_invariant, capped=spec in CAPPED, sinks=spec in SINKS))
        for spec in OF_E4M3
        for shape in HEAD_SHAPES.values()
        if shape.head_dim in CAPPED_HEAD_DIMS or spec not in CAPPED
    ]
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [
        *((spec, (dtype, dtype, *template)) for dtype in halves for spec, template in pairs),
        *((OF_E4M3[spec], (dtype, E4M3, *template)) for dtype in halves for spec, template in pairs),
    ]


def prefill_config(
    shape: HeadShape, num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int, *, e4m3: bool = False
) -> LaunchConfig:
    """As many tiles as `num_tokens` can make however they are divided into rows: each row's last may be partial."""
    group = num_heads // num_kv_heads
    tiles = num_tokens * group // shape.tile_rows + min(num_seqs, num_tokens)
    pitch = (shape.head_dim + SEGMENT) * HALF_BYTES
    shared_bytes = (shape.tile_rows + 2 * shape.tile_keys) * pitch + 8 * shape.tile_keys
    if e4m3:
        shared_bytes += shape.tile_keys * shape.head_dim
    return LaunchConfig((tiles, num_kv_heads, 1), (WARPS * WARP_SIZE, 1, 1), shared_bytes)


def _accepts(problem: AttentionProblem, device: CudaDevice) -> HeadShape | None:
    if problem.rows != "prompts" or problem.dtype == "float" or not problem.is_aligned:
        return None
    if problem.capped and problem.head_dim not in CAPPED_HEAD_DIMS:
        return None
    return HEAD_SHAPES.get(problem.head_dim)


def _launch(device: CudaDevice, problem: AttentionProblem, shape: HeadShape, operands: AttentionOperands) -> None:
    q, metadata, num_kv_heads = operands.q, operands.metadata, operands.key_cache.shape[1]
    num_seqs = metadata.table_rows.shape[0]
    params = PagedAttentionPrefillParams(
        q=q,
        key_cache=operands.key_cache,
        value_cache=operands.value_cache,
        block_tables=metadata.block_tables,
        table_rows=metadata.table_rows,
        cu_seqlens_q=metadata.cu_seqlens_q,
        context_lens=metadata.context_lens,
        out=operands.out,
        num_seqs=num_seqs,
        num_heads=operands.num_heads,
        num_kv_heads=num_kv_heads,
        block_size=problem.block_size,
        block_table_width=metadata.block_tables.shape[1],
        sliding_window=operands.window,
        scale_log2=operands.scale_log2,
        cap_log2=operands.cap_log2,
        sinks=operands.sinks,
        kv_scales=operands.kv_scales,
    )
    e4m3 = problem.cached == E4M3
    config = prefill_config(shape, q.shape[0], num_seqs, operands.num_heads, num_kv_heads, e4m3=e4m3)
    in_order, capped, sinks = problem.in_order, problem.capped, problem.has_sinks
    spec = PREFILL_IN_ORDER if in_order else PAGED_ATTENTION_PREFILL
    if capped:
        spec = CAPPED_PREFILL_IN_ORDER if in_order else CAPPED_PREFILL
    elif sinks:
        spec = SINK_PREFILL_IN_ORDER if in_order else SINK_PREFILL
    template = shape.prefill_template(in_order=in_order, capped=capped, sinks=sinks)
    device.launch(OF_E4M3[spec] if e4m3 else spec, (problem.dtype, problem.cached, *template), config, params)


ATTENTION.register(Candidate("prefill", SPECS, _accepts, _launch, order=2))
