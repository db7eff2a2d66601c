"""The operations as CUDA kernels.

Public: `CudaOps`; `registry.all_specs` and `all_instantiations`, every kernel; `candidates`, how one of several kernels
is chosen; `generate`, which writes the generated headers for an editor.

A kernel is declared in the file of its operation: a NamedTuple of its parameters (`engine.cuda.params`), a KernelSpec,
constants that Python and the kernel share, and `declare_header`, which makes `generated/<name>.cuh` of them. Its source
includes that and takes `<NAME>_PARAMS(T)`; a launch names the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.activation import ActivationOps
from tessera.engine.ops.cuda.attention import AttentionOps
from tessera.engine.ops.cuda.collectives import SliceOps
from tessera.engine.ops.cuda.elementwise import ElementwiseOps
from tessera.engine.ops.cuda.encoder import EncoderOps
from tessera.engine.ops.cuda.linear_ops import LinearOps
from tessera.engine.ops.cuda.moe.ops import MoEOps
from tessera.engine.ops.cuda.norm import NormOps
from tessera.engine.ops.cuda.random import RandomOps
from tessera.engine.ops.cuda.registry import OF_DRAFTS, OF_RARE_OPS, OF_USUAL_DRAFTS, all_instantiations
from tessera.engine.ops.cuda.sampling import SamplingOps
from tessera.engine.ops.cuda.softmax import SoftmaxOps
from tessera.engine.ops.cuda.types import E4M3, cuda_type
from tessera.engine.ops.interface import RareOp


class CudaOps(
    LinearOps,
    MoEOps,
    AttentionOps,
    NormOps,
    ActivationOps,
    ElementwiseOps,
    SoftmaxOps,
    RandomOps,
    SamplingOps,
    SliceOps,
    EncoderOps,
):
    """All operations on one CUDA device; see `tessera.engine.ops.interface.Ops`."""

    def __init__(self, device: CudaDevice, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: a row's bits depend on nothing but the row; see docs/kernels/order-of-sums.md."""
        self.device = device
        self.batch_invariant = batch_invariant

    def compile(
        self,
        dtype: np.dtype[Any],
        progress: Callable[[int, int], None] | None = None,
        *,
        encoder_only: bool = False,
        head_dims: Collection[int] | None = None,
        rare_ops: Collection[RareOp] = (),
        e4m3_cache: bool = False,
        drafts: bool = False,
    ) -> None:
        """Compile beforehand all that a model in `dtype` launches; `progress` is told (done, total).

        With `head_dims` only attention over heads of these sizes. Of the operations that few models have only
        `rare_ops`. `e4m3_cache`: attention is over a KV cache of e4m3. `drafts`: steps verify drafts.

        `reserve_linear` compiles those for its weights' formats, and what is left is compiled when it is first used.

        Raises: CompileError.
        """
        pairs = all_instantiations((cuda_type(dtype),), encoder_only=encoder_only, head_dims=head_dims)
        rare = {spec for op in rare_ops for spec in OF_RARE_OPS[op]}
        rare = rare | set(OF_USUAL_DRAFTS) if drafts else rare - set(OF_DRAFTS)
        pairs = [
            (spec, template)
            for spec, template in pairs
            if (spec in rare or not spec.on_demand) and (self.batch_invariant or not spec.batch_invariant)
            if "Cached" not in spec.template or (E4M3 in template) == e4m3_cache
        ]
        self.device.compile([pair for pair in pairs if pair[0].supports(self.device.arch)], progress)
