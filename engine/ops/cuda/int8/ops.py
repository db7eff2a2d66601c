"""Products of many rows by packed weights of few bits, where both may be rounded to int8.

A weight is brought from its own form to int8 in a scratch that products share, with a scale for each row that is
computed once, and the activations to int8 with a scale for every 256 columns. Products of few rows are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.formats import LinearWeight, PackedFormat, WeightPart
from tessera.engine.ops.cuda.fp8.problem import Fp8Problem
from tessera.engine.ops.cuda.fp8.sm90 import Scaled, ScaledOperands
from tessera.engine.ops.cuda.int8 import sm90
from tessera.engine.ops.cuda.linear import quantize_rows
from tessera.engine.ops.cuda.quant.blocks import BLOCK_SCALES, BLOCKS_TO_INT8, launch_scales, launch_to_int8
from tessera.engine.ops.cuda.quant.dequantize import DequantizeOps
from tessera.engine.ops.cuda.quant.product import takes_any_rows
from tessera.engine.ops.cuda.types import HALF_BYTES, aligned, cuda_type
from tessera.engine.ops.linear_interface import Accumulate, Activate, Epilogue, LayerNorm, Prologue, RMSNorm
from tessera.engine.tensor import Tensor, empty, float32, uint8

FEW_ROWS = 256  # up to here a product takes longer as int8, or no less
WIDE_BYTES = 16  # of the widest copies


class Int8LinearOps(DequantizeOps):
    """Attributes: rounds_many_rows: whether products of more than FEW_ROWS rows are of int8, where a kernel does it."""

    rounds_many_rows = False

    @cached_property
    def _scales(self) -> dict[int, tuple[tuple[WeightPart, ...], Tensor]]:
        """Of the rows of each weight by its address, with its parts, so that nothing else comes to lie there."""
        return {}

    def reserve_linear(self, weights: Iterable[LinearWeight], dtype: np.dtype[Any], max_rows: int = 0) -> None:
        """Also what products of int8 take."""
        weights = list(weights)
        super().reserve_linear(weights, dtype, max_rows)
        rounded = [weight for weight in weights if max_rows > FEW_ROWS and self.may_round(weight, dtype)]
        if not rounded:
            return
        if all(self.may_round(weight, dtype) or not self._is_dequantised(weight, dtype) for weight in weights):
            self.dequantises = False
        parts = [part.format for weight in rounded for part in weight.parts]
        kernels: set[Instantiation] = {
            (spec, (format.kernel_type,))
            for format in parts
            if isinstance(format, PackedFormat)
            for spec in (BLOCK_SCALES, BLOCKS_TO_INT8)
        }
        kernels |= set(sm90.kernels_of(cuda_type(dtype)))
        kernels |= set(quantize_rows.kernels_of(cuda_type(dtype), groups=True, integers=True))
        self.device.compile(sorted(kernels, key=lambda kernel: (kernel[0].name, kernel[1])))
        self._scratch_of(max(weight.shape[0] * weight.shape[1] for weight in rounded))
        for weight in rounded:
            self._row_scales(weight)
        self._rows_scratch_of(max(quantize_rows.scratch_bytes(max_rows, weight.shape[1]) for weight in rounded))

    def _is_dequantised(self, weight: LinearWeight, dtype: np.dtype[Any]) -> bool:
        """Whether products of many rows are of the weight in 16 bits, if nothing is rounded."""
        is_stored = all(self.multiplies_stored(part.format, part.shape, dtype) for part in weight.parts)
        return weight.dense is None and not takes_any_rows(weight) and (not is_stored or weight.order is not None)

    def may_round(self, weight: LinearWeight, dtype: np.dtype[Any]) -> bool:
        """Whether products of many rows of `dtype` by this weight are of int8."""
        if not self.rounds_many_rows or self.batch_invariant or dtype.itemsize != HALF_BYTES:
            return False
        if weight.order is not None or takes_any_rows(weight) or not sm90.SM90_INT8_MATMUL.supports(self.device.arch):
            return False
        packed = all(isinstance(part.format, PackedFormat) for part in weight.parts)
        return packed and weight.shape[1] % sm90.STEP == 0

    def _int8_linear(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> bool:
        """The whole of `_linear`; False, and nothing done, where it is not for this path."""
        if x.shape[0] <= FEW_ROWS or isinstance(prologue, LayerNorm) or not self.may_round(weight, x.dtype):
            return False
        if not isinstance(epilogue, Activate):
            return self._int8_product(x, weight, prologue, out, accumulates=isinstance(epilogue, Accumulate))
        if epilogue.function == "silu_mul" and self._int8_product(x, weight, prologue, out, gated=True):
            return True
        if not self._int8_product(x, weight, prologue, epilogue.scratch):
            return False
        self._activate(epilogue.function, epilogue.scratch, out)
        return True

    def _int8_product(
        self,
        x: Tensor,
        weight: LinearWeight,
        prologue: RMSNorm | None,
        out: Tensor,
        *,
        gated: bool = False,
        accumulates: bool = False,
    ) -> bool:
        """False, and nothing done, where no kernel can."""
        norm, eps = (None, 0.0) if prologue is None else (prologue.weight, prologue.eps)
        if (gated and weight.bias is not None) or not aligned(WIDE_BYTES, x, norm):
            return False
        problem = Fp8Problem(
            num_rows=x.shape[0],
            weight_rows=weight.shape[0],
            in_features=x.shape[1],
            dtype=cuda_type(x.dtype),
            out_dtype=cuda_type(out.dtype),
            groups=False,
            gated=gated,
            accumulates=accumulates,
            biased=weight.bias is not None,
            from_x=False,
            normed=norm is not None,
            out_aligned=aligned(WIDE_BYTES, out) and out.shape[1] * out.dtype.itemsize % WIDE_BYTES == 0,
            in_order=self.batch_invariant,
        )
        plan = sm90.plan_of(self.device, problem)
        if plan is None:
            return False
        stored = self._as_integers(weight)
        rows = quantize_rows.as_integers(
            self.device, x, norm, eps, self._rows_scratch_of(quantize_rows.scratch_bytes(*x.shape))
        )
        operands = ScaledOperands(Scaled(*rows), stored, weight.bias, out.pointer, out.shape[1])
        sm90.launch(self.device, problem, plan, operands)
        return True

    def _as_integers(self, weight: LinearWeight) -> Scaled:
        """[N, K] as int8 with scales [N]; the values until the next call."""
        scratch = self._scratch_of(weight.shape[0] * weight.shape[1])
        values = Tensor(scratch.buffer, weight.shape, uint8, scratch.offset)
        scales = self._row_scales(weight)
        for part, place in _places(weight):
            launch_to_int8(self.device, part, scales[place], values[place])
        return Scaled(values, scales)

    def _row_scales(self, weight: LinearWeight) -> Tensor:
        """[N], computed once for each weight."""
        address = weight.parts[0].tensors["codes"].pointer
        known = self._scales.get(address)
        if known is None:
            assert not self.device.is_capturing, "reserve_linear comes before a recording"
            scales = empty((weight.shape[0],), float32, self.device)
            for part, place in _places(weight):
                launch_scales(self.device, part, scales[place])
            known = self._scales[address] = (weight.parts, scales)
        return known[1]


def _places(weight: LinearWeight) -> Iterator[tuple[WeightPart, slice]]:
    """Each part, and its rows in the weight."""
    starts = accumulate((part.shape[0] for part in weight.parts), initial=0)
    for part, start in zip(weight.parts, starts, strict=False):
        yield part, slice(start, start + part.shape[0])
