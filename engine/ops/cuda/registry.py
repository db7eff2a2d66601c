"""All kernels of all groups, for the tests and for compiling them before they are needed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tessera.engine.cuda import small_copies
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.ops.cuda import (
    activation,
    attention,
    collectives,
    elementwise,
    encoder,
    fp8,
    linear,
    lora,
    norm,
    random,
    sampling,
    softmax,
    training,
)
from tessera.engine.ops.cuda.int8 import sm90 as sm90_int8
from tessera.engine.ops.cuda.linear import quantize_rows, rank_products
from tessera.engine.ops.cuda.moe import blocks as expert_blocks
from tessera.engine.ops.cuda.moe import decode as expert_decode
from tessera.engine.ops.cuda.moe import mxfp4 as expert_mxfp4
from tessera.engine.ops.cuda.moe import router as expert_router
from tessera.engine.ops.cuda.moe import routing as expert_routing
from tessera.engine.ops.cuda.moe import rows as expert_rows
from tessera.engine.ops.cuda.moe import sm90 as sm90_experts
from tessera.engine.ops.cuda.moe import tiles as expert_tiles
from tessera.engine.ops.cuda.quant import (
    blocks,
    dequantize,
    gather,
    product,
    slices,
    sm90_product,
    sm90_row,
    sm90_rows,
    turn,
)
from tessera.engine.ops.interface import RareOp

GROUPS = (
    linear,
    dequantize,
    blocks,
    gather,
    turn,
    product,
    sm90_product,
    sm90_row,
    sm90_rows,
    slices,
    quantize_rows,
    fp8,
    sm90_int8,
    lora,
    attention,
    norm,
    activation,
    elementwise,
    softmax,
    random,
    sampling,
    encoder,
    collectives,
    rank_products,
    expert_routing,
    expert_router,
    expert_rows,
    expert_tiles,
    expert_decode,
    expert_blocks,
    expert_mxfp4,
    sm90_experts,
    training,
    small_copies,
)
ENCODER_GROUPS = (
    linear,
    dequantize,
    blocks,
    gather,
    quantize_rows,
    fp8,
    norm,
    activation,
    elementwise,
    encoder,
    small_copies,
)  # all that a text encoder launches


def _for_any_cache(*specs: KernelSpec[Any]) -> tuple[KernelSpec[Any], ...]:
    return (*specs, *(attention.OF_E4M3[spec] for spec in specs))


# Kernels of operations that few models have; see `tessera.engine.ops.interface.RareOp`.
OF_RARE_OPS: dict[RareOp, tuple[KernelSpec[Any], ...]] = {
    "soft_cap": _for_any_cache(
        attention.general.CAPPED_ATTENTION,
        attention.decode.CAPPED_ATTENTION_DECODE,
        attention.drafts.CAPPED_DRAFTS,
        attention.prefill.CAPPED_PREFILL,
        attention.prefill.CAPPED_PREFILL_IN_ORDER,
        *attention.sm90_prefill.CAPPED,
    ),
    "sinks": _for_any_cache(
        attention.general.SINK_ATTENTION,
        attention.decode.SINK_ATTENTION_DECODE,
        attention.decode.CLUSTERED_SINK_ATTENTION_DECODE,
        attention.drafts.SINK_DRAFTS,
        attention.prefill.SINK_PREFILL,
        attention.prefill.SINK_PREFILL_IN_ORDER,
        *attention.sm90_prefill.WITH_SINKS,
    ),
    "relu": (activation.RELU,),
    "rmsnorm_add": (norm.RMSNORM_ADD,),
    "norm_columns": (norm.NORM_COLUMNS,),
    "rotate": (attention.rope.ROTATE,),
}
OF_DRAFTS = attention.drafts.SPECS  # that only engines with speculative decoding launch
OF_USUAL_DRAFTS = _for_any_cache(attention.drafts.PAGED_ATTENTION_DRAFTS)


def all_specs() -> tuple[KernelSpec[Any], ...]:
    """The description of every kernel in `cuda_src/`."""
    return tuple(spec for group in GROUPS for spec in group.SPECS)


def all_instantiations(
    dtypes: tuple[str, ...], *, encoder_only: bool = False, head_dims: Collection[int] | None = None
) -> list[Instantiation]:
    """Every kernel that the operations can launch for elements of these C types ('float', '__nv_bfloat16'),
    with `head_dims` only for heads of these sizes."""
    groups = ENCODER_GROUPS if encoder_only else GROUPS
    pairs = [pair for group in groups for pair in group.instantiations(dtypes)]
    if head_dims is None:
        return pairs
    wanted = {None, *map(str, head_dims)}
    return [pair for pair in pairs if _head_dim(*pair) in wanted]


def _head_dim(spec: KernelSpec[Any], template: tuple[str, ...]) -> str | None:
    return template[spec.template.index("HEAD_DIM")] if "HEAD_DIM" in spec.template else None
