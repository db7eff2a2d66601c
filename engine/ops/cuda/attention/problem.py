"""What the choice of attention's kernels depends on, the table of the kernels, and the memory that they share."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tessera.engine.ops.cuda.attention.memory import AttentionMemory
from tessera.engine.ops.cuda.candidates import CandidateTable
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import Tensor

# Rows of a step: those with two or more queries, those with one, those with one whose queries, key and value are still
# to be made from projections, or all.
Rows = Literal["prompts", "decodes", "fused_decodes", "all"]


class AttentionProblem(NamedTuple):
    """Attention over the paged cache.

    Attributes:
        rows: of the step.
        dtype, cached: C names of the elements of activations and cache.
        head_dim, block_size: of the cache.
        is_aligned: queries, caches and result begin at multiples of 16 bytes.
        in_order: a query's keys are added in an order of its own, whatever else is in the step.
        in_pairs: norms and rotation may take two elements at a time; of `fused_decodes`.
    """

    rows: Rows
    dtype: str
    cached: str
    head_dim: int
    block_size: int
    is_aligned: bool
    in_order: bool = False
    in_pairs: bool = True


class AttentionOperands(NamedTuple):
    """q is [T, (Hq + 2 Hkv) * D] where a transform is still to be done, else [T, Hq * D]; see `Ops.paged_attention`.

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
    kv_scales: Tensor | None = None


ATTENTION: CandidateTable[AttentionProblem, AttentionOperands] = CandidateTable("attention")
