"""Attention of every dtype and head size, one block a query's head."""

from __future__ import annotations

from dataclasses import replace
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
from tessera.engine.ops.cuda.attention.problem import ATTENTION, AttentionOperands, AttentionProblem, for_e4m3
from tessera.engine.ops.cuda.attention.rope import MAX_HEAD_DIM as LARGEST_HEAD_DIM
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.types import E4M3, WARP_SIZE


class PagedAttentionParams(NamedTuple):
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
    head_dim: Int32
    block_size: Int32
    block_table_width: Int32
    sliding_window: Int32
    scale_log2: Float32
    cap_log2: Float32
    sinks: RestrictInT
    kv_scales: InFloat


PAGED_ATTENTION = KernelSpec(
    file="attention/attention.cu",
    name="paged_attention_kernel",
    template=("T", "Cached", "CAPPED", "SINKS"),
    params=PagedAttentionParams,
)
# The same function, with CAPPED or SINKS.
CAPPED_ATTENTION = replace(PAGED_ATTENTION, on_demand=True)
SINK_ATTENTION = replace(PAGED_ATTENTION, on_demand=True)
FLAGS = {
    PAGED_ATTENTION: ("false", "false"),
    CAPPED_ATTENTION: ("true", "false"),
    SINK_ATTENTION: ("false", "true"),
}
OF_E4M3 = for_e4m3(*FLAGS)
SPECS = (*OF_E4M3, *OF_E4M3.values())

WARPS = Constant(4, "of a block")
MAX_HEAD_DIM = Constant(LARGEST_HEAD_DIM)
declare_header("attention", __name__, {"WARPS": WARPS, "MAX_HEAD_DIM": MAX_HEAD_DIM}, (PagedAttentionParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    pairs = [(spec, dtype, flags) for dtype in dtypes for spec, flags in FLAGS.items()]
    return [
        *((spec, (dtype, dtype, *flags)) for spec, dtype, flags in pairs),
        *((OF_E4M3[spec], (dtype, E4M3, *flags)) for spec, dtype, flags in pairs),
    ]


def _accepts(problem: AttentionProblem, device: CudaDevice) -> bool | None:
    return True if problem.rows == "all" else None


def _launch(device: CudaDevice, problem: AttentionProblem, plan: object, operands: AttentionOperands) -> None:
    q, metadata = operands.q, operands.metadata
    params = PagedAttentionParams(
        q=q,
        key_cache=operands.key_cache,
        value_cache=operands.value_cache,
        block_tables=metadata.block_tables,
        table_rows=metadata.table_rows,
        cu_seqlens_q=metadata.cu_seqlens_q,
        context_lens=metadata.context_lens,
        out=operands.out,
        num_seqs=metadata.table_rows.shape[0],
        num_heads=operands.num_heads,
        num_kv_heads=operands.key_cache.shape[1],
        head_dim=problem.head_dim,
        block_size=problem.block_size,
        block_table_width=metadata.block_tables.shape[1],
        sliding_window=operands.window,
        scale_log2=operands.scale_log2,
        cap_log2=operands.cap_log2,
        sinks=operands.sinks,
        kv_scales=operands.kv_scales,
    )
    config = LaunchConfig((q.shape[0], operands.num_heads, 1), (WARPS * WARP_SIZE, 1, 1))
    spec = PAGED_ATTENTION
    if problem.capped:
        spec = CAPPED_ATTENTION
    elif problem.has_sinks:
        spec = SINK_ATTENTION
    template = (problem.dtype, problem.cached, *FLAGS[spec])
    device.launch(OF_E4M3[spec] if problem.cached == E4M3 else spec, template, config, params)


ATTENTION.register(Candidate("general", SPECS, _accepts, _launch, order=0))
