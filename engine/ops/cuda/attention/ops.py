"""Attention over the paged cache: rows with two or more queries and rows with one by a kernel each, or all by one.

A row's result depends on nothing but the row, except as the files of the kernels say; with `batch_invariant` on nothing
else at all. Rows with one query and those with more still differ in their last bits.
"""

from __future__ import annotations

import math
from functools import cached_property

from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.cuda.attention import sm90_prefill, widen
from tessera.engine.ops.cuda.attention.decode import DECODE_SHAPES
from tessera.engine.ops.cuda.attention.division import IN_ORDER_SPLITS
from tessera.engine.ops.cuda.attention.memory import AttentionMemory
from tessera.engine.ops.cuda.attention.problem import ATTENTION, AttentionOperands, AttentionProblem, Rows
from tessera.engine.ops.cuda.attention.rope import RopeOps, check_head_dim, rotates_pairs
from tessera.engine.ops.cuda.candidates import Chooser
from tessera.engine.ops.cuda.types import aligned, cached_type, cuda_type
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import Tensor

NO_WINDOW = 1 << 30


class AttentionOps(RopeOps):
    batch_invariant = False  # see `CudaOps`

    @cached_property
    def attention_kernels(self) -> Chooser[AttentionProblem, AttentionOperands]:
        """Chooses the kernels of attention; tests and benchmarks restrict it."""
        return Chooser(ATTENTION, self.device)

    @cached_property
    def attention_memory(self) -> AttentionMemory:
        return AttentionMemory(self.device)

    def reserve_attention(self, max_num_seqs: int, num_heads: int, head_dim: int, *, e4m3_cache: bool = False) -> None:
        """Allocate what steps of up to `max_num_seqs` rows need, so that serving allocates nothing.

        It also settles into how many parts a long context is divided, and so must come before the
        first step. Raises: OutOfMemoryError.
        """
        if head_dim in DECODE_SHAPES:
            splits = IN_ORDER_SPLITS if self.batch_invariant else None
            self.attention_memory.reserve_decodes(max_num_seqs, num_heads, head_dim, splits)
        if sm90_prefill.runs(self.device, head_dim):
            sm90_prefill.splits_of(self.attention_memory)
            if e4m3_cache:
                widen.widened_cache_of(self.attention_memory)

    def _paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        kv_scales: Tensor | None,
        out: Tensor,
    ) -> None:
        head_dim = key_cache.shape[3]
        check_head_dim(head_dim)
        operands = AttentionOperands(
            q,
            key_cache,
            value_cache,
            metadata,
            q.shape[1] // head_dim,
            _kernel_scale(scale, soft_cap),
            _kernel_window(sliding_window),
            out,
            self.attention_memory,
            cap_log2=_kernel_cap(soft_cap),
            sinks=sinks,
            kv_scales=kv_scales,
        )
        problem = self._problem("decodes", operands)
        verifies = metadata.verifies and metadata.max_seqlen_q > 1
        if verifies and self.attention_kernels.launch(problem._replace(rows="drafts"), operands):
            return
        decodes = self.attention_kernels.choose(problem)
        if metadata.max_seqlen_q > 1 and decodes is not None:
            of_prompts = problem._replace(rows="prompts")
            prompts = self.attention_kernels.choose(of_prompts)
            if prompts is not None:
                prompts.candidate.launch(self.device, of_prompts, prompts.plan, operands)
                lets_others_start = any(spec.overlaps for spec in prompts.candidate.specs)
                operands = operands._replace(beside_prefill=lets_others_start)
            else:
                decodes = None
        if decodes is not None:
            decodes.candidate.launch(self.device, problem, decodes.plan, operands)
        elif not self.attention_kernels.launch(problem._replace(rows="all"), operands):
            raise TesseraError(f"no kernel that may be chosen does {problem}")

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
        soft_cap: float | None,
        sinks: Tensor | None,
        kv_scales: Tensor | None,
        queries: Tensor,
        out: Tensor,
    ) -> None:
        if metadata.max_seqlen_q <= 1:
            operands = AttentionOperands(
                qkv,
                key_cache,
                value_cache,
                metadata,
                num_heads,
                _kernel_scale(scale, soft_cap),
                _kernel_window(sliding_window),
                out,
                self.attention_memory,
                transform,
                cap_log2=_kernel_cap(soft_cap),
                sinks=sinks,
                kv_scales=kv_scales,
            )
            cos_sin, q_norm, k_norm, _ = transform
            in_pairs = rotates_pairs(key_cache.shape[3], cos_sin, q_norm, k_norm)
            problem = self._problem("fused_decodes", operands, in_pairs=in_pairs)
            if self.attention_kernels.launch(problem, operands):
                return
        inputs = (qkv, key_cache, value_cache, metadata, transform)
        super()._attention(*inputs, num_heads, scale, sliding_window, soft_cap, sinks, kv_scales, queries, out)

    def _problem(self, rows: Rows, operands: AttentionOperands, *, in_pairs: bool = True) -> AttentionProblem:
        q, keys, values = operands.q, operands.key_cache, operands.value_cache
        is_aligned = aligned(16, q, keys, values, operands.out)
        sizes = keys.shape[3], keys.shape[2]
        types = cuda_type(q.dtype), cached_type(q.dtype, keys.dtype)
        capped, has_sinks = operands.cap_log2 > 0, operands.sinks is not None
        return AttentionProblem(rows, *types, *sizes, is_aligned, self.batch_invariant, in_pairs, capped, has_sinks)


def _kernel_scale(scale: float, soft_cap: float | None) -> float:
    """The kernels compute powers of 2, and of what a soft cap takes the tanh."""
    assert scale > 0, "the kernels find the maximum before they scale"
    return scale * math.log2(math.e) if soft_cap is None else scale / soft_cap


def _kernel_cap(soft_cap: float | None) -> float:
    return 0.0 if soft_cap is None else soft_cap * math.log2(math.e)


def _kernel_window(sliding_window: int | None) -> int:
    return NO_WINDOW if sliding_window is None else min(sliding_window, NO_WINDOW)
