"""What the choice of attention's kernels depends on, the table of the kernels, and the memory that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.ops.cuda.attention.memory import AttentionMemory
from tessera.engine.ops.cuda.candidates import CandidateTable
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import Tensor

# Rows of a step: those with two or more queries, those with one, those with one whose queries, key and value are still
# to be made from projections, all as rows of one query each would be, or all.
Rows = Literal["prompts", "decodes", "fused_decodes", "drafts", "all"]

CAPPED_HEAD_DIMS = (128, 256)  # of models with soft caps
E4M3_ARCH = 89  # the first that converts e4m3


def for_e4m3(*specs: KernelSpec[Any]) -> dict[KernelSpec[Any], KernelSpec[Any]]:
    """Those of the same functions for a KV cache of e4m3, by each."""
    return {spec: replace(spec, min_arch=max(spec.min_arch, E4M3_ARCH)) for spec in specs}


class AttentionProblem(NamedTuple):
    """Attention over the paged cache.

    Attributes:
        rows: of the step.
        dtype, cached: C names of the elements of activations and cache.
        head_dim, block_size: of the cache.
        is_aligned: queries, caches and result begin at multiples of 16 bytes.
        in_order: a query's keys are added in an order of its own, whatever else is in the step.
        in_pairs: norms and rotation may take two elements at a time; of `fused_decodes`.
        capped: scores pass a soft cap.
        has_sinks: heads have sinks, and scores no soft cap.
    """

    rows: Rows
    dtype: str
    cached: str
    head_dim: int
    block_size: int
    is_aligned: bool
    in_order: bool = False
    in_pairs: bool = True
    capped: bool = False
    has_sinks: bool = False


class AttentionOperands(NamedTuple):
    """q is [T, (Hq + 2 Hkv) * D] where a transform is still to be done, else [T, Hq * D]; see `Ops.paged_attention`.

    `scale_log2` is the scale times log2(e). With a soft cap c it is scale / c, and `cap_log2` c times log2(e).
    `beside_prefill`: the kernel in front is one of the same step's prompts, which lets this one run beside it.
    """

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    num_heads: int
    scale_log2: float
    window: int
    out: Tensor
    memory: AttentionMemory
    transform: HeadTransform | None = None
    beside_prefill: bool = False
    cap_log2: float = 0.0
    sinks: Tensor | None = None
    kv_scales: Tensor | None = None


ATTENTION: CandidateTable[AttentionProblem, AttentionOperands] = CandidateTable("attention")
