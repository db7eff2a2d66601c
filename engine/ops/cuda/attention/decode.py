"""Attention of rows with one query on tensor cores, of 16-bit dtypes and the head sizes of `DECODE_SHAPES`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutCached, OutFloat, OutT, OutUint
from tessera.engine.ops.cuda.attention.division import (
    IN_ORDER_SPLITS,
    MAX_CLUSTER,
    SPLIT_KEYS,
    WARP_KEYS,
    Division,
    decode_splits,
    divide,
)
from tessera.engine.ops.cuda.attention.problem import (
    ATTENTION,
    CAPPED_HEAD_DIMS,
    AttentionOperands,
    AttentionProblem,
    for_e4m3,
)
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.types import E4M3, HALF_BYTES, MAX_CACHED_CONFIGS, SEGMENT, WARP_SIZE, ceil_div
from tessera.engine.ops.interface import HeadTransform
from tessera.engine.tensor import float32


class PagedAttentionDecodeParams(NamedTuple):
    q: InT
    key_cache: OutCached
    value_cache: OutCached
    block_tables: InInt
    table_rows: InInt
    cu_seqlens_q: InInt
    context_lens: InInt
    q_norm: InT
    k_norm: InT
    cos_sin: InFloat
    positions: InInt
    slot_mapping: InInt
    out: OutT
    partial_out: OutFloat
    partial_sums: OutFloat
    arrivals: OutUint
    num_tokens: Int32
    num_seqs: Int32
    group: Int32
    num_kv_heads: Int32
    rotary_dim: Int32
    block_size: Int32
    block_table_width: Int32
    sliding_window: Int32
    even_splits: Int32
    min_split_keys: Int32
    max_split_keys: Int32
    max_splits: Int32
    block_splits: Int32
    helpers: Int32
    cluster_log2: Int32
    beside_prefill: Int32
    eps: Float32
    scale_log2: Float32
    cap_log2: Float32
    sinks: InT
    kv_scales: InFloat


CLUSTER_ARCH = 90

PAGED_ATTENTION_DECODE = KernelSpec(
    file="attention/decode.cu",
    name="paged_attention_decode_kernel",
    template=("T", "Cached", "HEAD_DIM", "WARPS", "STAGES", "FUSED", "CLUSTERED", "CAPPED", "SINKS"),
    params=PagedAttentionDecodeParams,
    overlaps=True,
)
# The same function, with CLUSTERED: blocks that share a row's keys merge in each other's shared memory.
CLUSTERED_ATTENTION_DECODE = replace(PAGED_ATTENTION_DECODE, min_arch=CLUSTER_ARCH)
# The same functions, with CAPPED or SINKS.
CAPPED_ATTENTION_DECODE = replace(PAGED_ATTENTION_DECODE, on_demand=True)
SINK_ATTENTION_DECODE = replace(PAGED_ATTENTION_DECODE, on_demand=True)
CLUSTERED_SINK_ATTENTION_DECODE = replace(CLUSTERED_ATTENTION_DECODE, on_demand=True)
WITH_SINKS = {
    PAGED_ATTENTION_DECODE: SINK_ATTENTION_DECODE,
    CLUSTERED_ATTENTION_DECODE: CLUSTERED_SINK_ATTENTION_DECODE,
}
OF_E4M3 = for_e4m3(*WITH_SINKS, CAPPED_ATTENTION_DECODE, *WITH_SINKS.values())
SPECS = (*OF_E4M3, *OF_E4M3.values())

GROUP_ROWS = Constant(8, "query heads of a key/value head that are handled together")
UNIT_KEYS = Constant(8, "keys that lie in one block of the cache")
MERGED_FLOATS = Constant(8, "of an output that a thread merges at a time")
SENT_FLOATS = Constant(12, "of a split, from block to block: MERGED_FLOATS, their maximum and sum, padded to 16 bytes")
MERGE_PADDING = Constant(4, "floats behind each row that a warp leaves to be merged")
declare_header(
    "decode",
    __name__,
    {
        "GROUP_ROWS": GROUP_ROWS,
        "UNIT_KEYS": UNIT_KEYS,
        "WARP_KEYS": WARP_KEYS,
        "SPLIT_KEYS": SPLIT_KEYS,
        "MERGED_FLOATS": MERGED_FLOATS,
        "SENT_FLOATS": SENT_FLOATS,
        "MERGE_PADDING": MERGE_PADDING,
        "MAX_CLUSTER": MAX_CLUSTER,
    },
    (PagedAttentionDecodeParams,),
)

STATIC_BYTES = 1536  # of shared memory for each block: what the kernel declares, and what the driver keeps
MANY_ROW_GROUPS = 257


@dataclass(frozen=True)
class DecodeShape:
    """Warps and ring stages of a block for one head size.

    Attributes:
        resident: blocks for which a multiprocessor has registers.
    """

    head_dim: int
    warps: int
    stages: int
    resident: int

    def template(
        self, *, fused: bool, clustered: bool = False, capped: bool = False, sinks: bool = False
    ) -> tuple[str, ...]:
        flags = ("true" if flag else "false" for flag in (fused, clustered, capped, sinks))
        return (str(self.head_dim), str(self.warps), str(self.stages), *flags)


DECODE_SHAPES = {
    shape.head_dim: shape
    for shape in (
        DecodeShape(64, warps=4, stages=2, resident=4),
        DecodeShape(80, warps=4, stages=2, resident=4),
        DecodeShape(96, warps=4, stages=2, resident=3),
        DecodeShape(128, warps=4, stages=2, resident=3),
        DecodeShape(256, warps=4, stages=1, resident=2),
    )
}
MANY_ROWS_SHAPES = {128: DecodeShape(128, warps=2, stages=3, resident=4)}  # more blocks to a multiprocessor
# Of e4m3, whose tiles are half as large.
CODE_SHAPES = {
    shape.head_dim: shape
    for shape in (
        DecodeShape(64, warps=4, stages=4, resident=5),
        DecodeShape(80, warps=4, stages=4, resident=4),
        DecodeShape(96, warps=4, stages=4, resident=4),
        DecodeShape(128, warps=4, stages=3, resident=4),
        DecodeShape(256, warps=4, stages=1, resident=2),
    )
}
MANY_ROWS_CODE_SHAPES = {128: DecodeShape(128, warps=2, stages=3, resident=6)}


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched here for elements of these C types."""
    pairs = _templates(DECODE_SHAPES, MANY_ROWS_SHAPES)
    widened = [
        (spec, template)
        for spec, template in _templates(CODE_SHAPES, MANY_ROWS_CODE_SHAPES)
        if spec.min_arch < CLUSTER_ARCH or may_cluster(int(template[0]))
    ]
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [
        *((spec, (dtype, dtype, *template)) for dtype in halves for spec, template in pairs),
        *((OF_E4M3[spec], (dtype, E4M3, *template)) for dtype in halves for spec, template in widened),
    ]


def _templates(
    few_rows: dict[int, DecodeShape], many_rows: dict[int, DecodeShape]
) -> list[tuple[KernelSpec[PagedAttentionDecodeParams], tuple[str, ...]]]:
    """Kernels and their template arguments behind the types, by the shapes of each head size."""
    shapes = (*few_rows.values(), *many_rows.values())
    pairs = [(PAGED_ATTENTION_DECODE, shape.template(fused=fused)) for shape in shapes for fused in (False, True)]
    pairs += [(CLUSTERED_ATTENTION_DECODE, shape.template(fused=True, clustered=True)) for shape in few_rows.values()]
    pairs += [(WITH_SINKS[spec], (*template[:-1], "true")) for spec, template in pairs]
    pairs += [
        (CAPPED_ATTENTION_DECODE, few_rows[head_dim].template(fused=fused, capped=True))
        for head_dim in CAPPED_HEAD_DIMS
        for fused in (False, True)
    ]
    return pairs


def may_cluster(head_dim: int) -> bool:
    """Whether blocks that widen e4m3 have the registers for a cluster's merging, too."""
    return head_dim <= 128


def query_heads(num_heads: int, num_kv_heads: int) -> int:
    """Of a key/value head, those that a block handles together."""
    return min(num_heads // num_kv_heads, GROUP_ROWS)


def head_groups(num_heads: int, num_kv_heads: int) -> int:
    """Blocks of the decode kernel that share a row's split."""
    return num_kv_heads * ceil_div(num_heads // num_kv_heads, GROUP_ROWS)


def ring_bytes(shape: DecodeShape, merged_rows: int, *, e4m3: bool) -> int:
    """Shared memory of a block's tiles of keys and values and, of e4m3, of the rows that warps leave to be merged."""
    keys = shape.warps * shape.stages * 2 * WARP_KEYS
    if not e4m3:
        return keys * (shape.head_dim + SEGMENT) * HALF_BYTES
    merged = merged_rows * (shape.head_dim + MERGE_PADDING) * float32.itemsize
    return keys * shape.head_dim + shape.warps * merged


def block_bytes(shape: DecodeShape, query_rows: int, *, e4m3: bool) -> int:
    """Shared memory of a block that is not of a cluster, for `query_rows` heads."""
    pitch = (shape.head_dim + SEGMENT) * HALF_BYTES
    return ring_bytes(shape, query_rows, e4m3=e4m3) + query_rows * pitch + 2 * shape.head_dim * HALF_BYTES


def resident_blocks(shape: DecodeShape, query_rows: int, shared_bytes: int, *, e4m3: bool) -> int:
    """Of a multiprocessor that gives a block up to `shared_bytes` of shared memory."""
    fitting = (shared_bytes + STATIC_BYTES) // (block_bytes(shape, query_rows, e4m3=e4m3) + STATIC_BYTES)
    return max(min(shape.resident, fitting), 1)


def decode_config(
    shape: DecodeShape,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    splits: int,
    division: Division,
    *,
    e4m3: bool = False,
) -> LaunchConfig:
    """Blocks for `splits` splits of every row."""
    query_rows = query_heads(num_heads, num_kv_heads)
    shared_bytes = block_bytes(shape, query_rows, e4m3=e4m3)
    block = (shape.warps * WARP_SIZE, 1, 1)
    groups, num_seqs, cluster = head_groups(num_heads, num_kv_heads), max(num_seqs, 1), division.cluster
    if cluster == 1:
        blocks = division.even_splits if division.helpers else ceil_div(splits, division.block_splits)
        return LaunchConfig((groups, division.helpers + num_seqs, blocks), block, shared_bytes)
    items = query_rows * shape.head_dim // MERGED_FLOATS
    received = max(count * ceil_div(items, min(count, cluster)) for count in range(1, splits + 1))
    shared_bytes += received * SENT_FLOATS * float32.itemsize
    return LaunchConfig((groups * cluster, num_seqs, 1), block, shared_bytes, cluster)


class DecodePlan(NamedTuple):
    """A launch: the kernel, its template arguments after the element type, its configuration, the keys' division."""

    spec: KernelSpec[PagedAttentionDecodeParams]
    template: tuple[str, ...]
    config: LaunchConfig
    division: Division


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def plan_decode(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    num_seqs: int,
    max_context_len: int,
    window: int,
    max_splits: int,
    multiprocessors: int,
    shared_bytes: int,
    *,
    fused: bool,
    clusters: bool,
    in_order: bool = False,
    capped: bool = False,
    sinks: bool = False,
    e4m3: bool = False,
) -> DecodePlan:
    """For rows of up to `max_context_len` keys, `max_splits` of which fit into memory, on a device with so many
    multiprocessors and so much shared memory for a block."""
    groups = head_groups(num_heads, num_kv_heads)
    clusters = fused and clusters and not capped and (not e4m3 or may_cluster(head_dim))
    few_rows, many_rows = (CODE_SHAPES, MANY_ROWS_CODE_SHAPES) if e4m3 else (DECODE_SHAPES, MANY_ROWS_SHAPES)
    shape = few_rows[head_dim]
    if num_seqs * groups >= MANY_ROW_GROUPS and not in_order and not capped:  # other warps add other keys
        shape = many_rows.get(head_dim, shape)
    at_once = resident_blocks(shape, query_heads(num_heads, num_kv_heads), shared_bytes, e4m3=e4m3)
    division = divide(
        num_seqs,
        groups,
        max_context_len,
        window,
        max_splits,
        multiprocessors * at_once,
        clusters=clusters,
        in_order=in_order,
        e4m3=e4m3,
    )
    splits = decode_splits(max_context_len, window, division)
    clustered = division.cluster > 1
    spec = CLUSTERED_ATTENTION_DECODE if clustered else PAGED_ATTENTION_DECODE
    if capped:
        spec = CAPPED_ATTENTION_DECODE
    elif sinks:
        spec = WITH_SINKS[spec]
    return DecodePlan(
        OF_E4M3[spec] if e4m3 else spec,
        shape.template(fused=fused, clustered=clustered, capped=capped, sinks=sinks),
        decode_config(shape, num_seqs, num_heads, num_kv_heads, splits, division, e4m3=e4m3),
        division,
    )


def _accepts(problem: AttentionProblem, device: CudaDevice) -> bool | None:
    return accepts_keys(problem) if problem.rows in ("decodes", "fused_decodes") else None


def accepts_keys(problem: AttentionProblem) -> bool | None:
    """True where this kernel has the types, the head size and the cache, for rows of one query each or several."""
    if problem.dtype == "float" or not problem.is_aligned or problem.block_size % UNIT_KEYS or not problem.in_pairs:
        return None
    if problem.capped and problem.head_dim not in CAPPED_HEAD_DIMS:
        return None
    return True if problem.head_dim in DECODE_SHAPES else None


def _launch(device: CudaDevice, problem: AttentionProblem, plan: object, operands: AttentionOperands) -> None:
    q, metadata, memory = operands.q, operands.metadata, operands.memory
    num_heads, num_kv_heads, head_dim = operands.num_heads, operands.key_cache.shape[1], problem.head_dim
    num_seqs = metadata.table_rows.shape[0]
    spec, template, config, division = plan_decode(
        head_dim,
        num_heads,
        num_kv_heads,
        num_seqs,
        metadata.max_context_len,
        operands.window,
        IN_ORDER_SPLITS if problem.in_order else memory.max_splits,
        device.multiprocessors,
        device.max_shared_bytes,
        fused=operands.transform is not None,
        clusters=device.compute_capability >= (9, 0),
        in_order=problem.in_order,
        capped=problem.capped,
        sinks=problem.has_sinks,
        e4m3=problem.cached == E4M3,
    )
    cos_sin, q_norm, k_norm, eps = operands.transform or HeadTransform()
    partial_out, partial_sums, arrivals = memory.decode_pointers(num_seqs, num_heads, head_dim)
    params = PagedAttentionDecodeParams(
        q=q,
        key_cache=operands.key_cache,
        value_cache=operands.value_cache,
        block_tables=metadata.block_tables,
        table_rows=metadata.table_rows,
        cu_seqlens_q=metadata.cu_seqlens_q,
        context_lens=metadata.context_lens,
        q_norm=q_norm,
        k_norm=k_norm,
        cos_sin=cos_sin,
        positions=metadata.positions,
        slot_mapping=metadata.slot_mapping,
        out=operands.out,
        partial_out=partial_out,
        partial_sums=partial_sums,
        arrivals=arrivals,
        num_tokens=q.shape[0],
        num_seqs=num_seqs,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        rotary_dim=0 if cos_sin is None else cos_sin.shape[1],
        block_size=problem.block_size,
        block_table_width=metadata.block_tables.shape[1],
        sliding_window=operands.window,
        even_splits=division.even_splits,
        min_split_keys=division.min_split_keys,
        max_split_keys=division.max_split_keys,
        max_splits=division.max_splits,
        block_splits=division.block_splits,
        helpers=division.helpers,
        cluster_log2=division.cluster.bit_length() - 1,
        beside_prefill=operands.beside_prefill,
        eps=eps,
        scale_log2=operands.scale_log2,
        cap_log2=operands.cap_log2,
        sinks=operands.sinks,
        kv_scales=operands.kv_scales,
    )
    device.launch(spec, (problem.dtype, problem.cached, *template), config, params)


ATTENTION.register(Candidate("decode", SPECS, _accepts, _launch, order=0))
