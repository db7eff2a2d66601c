"""Products of 16-bit activations by e4m3 weights whose scheme rounds activations too.

The activations are quantised once for each product: of a single row by the product's own kernel, of several by one
before it, which computes the norm as well. Which way a weight goes depends on nothing but the weight and the GPU, so
every row of a model meets the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.formats import Fp8Format, LinearWeight, WeightFormat
from tessera.engine.ops.cuda.candidates import Choice, Chooser
from tessera.engine.ops.cuda.fp8 import decode, portable, sm90, sm90_rows
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, Fp8Operands, Fp8Problem, format_of
from tessera.engine.ops.cuda.linear import quantize_rows
from tessera.engine.ops.cuda.linear.quantize_rows import GROUP, QUANTIZE_ROWS, quantized, scratch_bytes
from tessera.engine.ops.cuda.quant.dequantize import DequantizeOps
from tessera.engine.ops.cuda.types import HALF_BYTES, aligned, cuda_type
from tessera.engine.ops.linear_interface import Accumulate, Activate, Epilogue, LayerNorm, Prologue, RMSNorm
from tessera.engine.tensor import Tensor

WIDE_BYTES = 16  # of the widest copies
MULTIPLE = 16  # of in_features


class Around(NamedTuple):
    """What a product computes beside itself."""

    norm: RMSNorm | None
    gated: bool
    accumulates: bool


class Fp8LinearOps(DequantizeOps):
    @cached_property
    def fp8_kernels(self) -> Chooser[Fp8Problem, Fp8Operands]:
        """Chooses the kernels of products by e4m3 weights; tests and benchmarks restrict it."""
        return Chooser(FP8_LINEAR, self.device)

    def reserve_linear(self, weights: Iterable[LinearWeight], dtype: np.dtype[Any], max_rows: int = 0) -> None:
        """Also the memory that `max_rows` rows take as e4m3."""
        weights = list(weights)
        rounding = [weight for weight in weights if self._rounds_rows_of(weight, dtype)]
        others = [weight for weight in weights if not self._rounds_rows_of(weight, dtype)]
        super().reserve_linear(others, dtype, max_rows)
        kernels: set[Instantiation] = set()
        for weight in rounding:
            for groups in {format_of(part).block is not None for part in weight.parts}:
                kernels |= set(self._kernels(cuda_type(dtype), groups=groups))
        self.device.compile(sorted(kernels, key=lambda kernel: (kernel[0].name, kernel[1])))
        if rounding:
            self._rows_scratch_of(max(scratch_bytes(max_rows, weight.shape[1]) for weight in rounding))

    def _kernels(self, dtype: str, *, groups: bool) -> list[Instantiation]:
        files = (quantize_rows, decode, sm90_rows, sm90, portable)
        kernels = [kernel for file in files for kernel in file.kernels_of(dtype, groups=groups)]
        return [kernel for kernel in kernels if kernel[0].supports(self.device.arch)]

    def _rounds_rows_of(self, weight: LinearWeight, dtype: np.dtype[Any]) -> bool:
        """Whether products by this weight are of activations as e4m3; else of the weight dequantised."""
        if weight.order is not None:
            return False
        return all(self.multiplies_stored(part.format, part.shape, dtype) for part in weight.parts)

    def multiplies_stored(self, format: WeightFormat, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        if not QUANTIZE_ROWS.supports(self.device.arch) or dtype.itemsize != HALF_BYTES:
            return False
        if not isinstance(format, Fp8Format) or not format.rounds_input or format.block not in (None, (GROUP, GROUP)):
            return False
        return shape[0] % 2 == 0 and shape[1] % MULTIPLE == 0

    def _fp8_linear(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> bool:
        """The whole of `_linear`; False, and nothing done, where it is not for this path."""
        if isinstance(prologue, LayerNorm) or not self._rounds_rows_of(weight, x.dtype):
            return False
        if not isinstance(epilogue, Activate):
            return self._fp8_product(x, weight, out, Around(prologue, False, isinstance(epilogue, Accumulate)))
        if epilogue.function == "silu_mul" and self._fp8_product(x, weight, out, Around(prologue, True, False)):
            return True
        if not self._fp8_product(x, weight, epilogue.scratch, Around(prologue, False, False)):
            return False
        self._activate(epilogue.function, epilogue.scratch, out)
        return True

    def _fp8_product(self, x: Tensor, weight: LinearWeight, out: Tensor, around: Around) -> bool:
        """False, and nothing done, where no kernel can."""
        if around.gated and (len(weight.parts) > 1 or weight.bias is not None):
            return False
        starts = list(accumulate((part.shape[0] for part in weight.parts), initial=0))
        norm, eps = (None, 0.0) if around.norm is None else (around.norm.weight, around.norm.eps)
        for from_x in (True, False):
            if from_x and not (decode.takes_row(x.shape[1], x.shape[0]) and aligned(WIDE_BYTES, x, norm)):
                continue
            chosen = self._choices(x, weight, out, around, from_x=from_x)
            if chosen is not None:
                break
        else:
            return False
        made: dict[Fp8Format, tuple[Tensor, Tensor]] = {}  # x by the formats of parts
        for part, start, (problem, choice) in zip(weight.parts, starts, chosen, strict=False):
            format = format_of(part)
            if not problem.from_x and format not in made:
                scratch = self._rows_scratch_of(scratch_bytes(*x.shape))
                made = {format: quantized(self.device, x, norm, eps, format, scratch)}
            values, scales = made.get(format, (None, None))
            operands = Fp8Operands(
                x=x if problem.from_x else None,
                norm=norm if problem.from_x else None,
                eps=eps,
                values=values,
                scales=scales,
                part=part,
                bias=None if weight.bias is None else weight.bias[start : start + part.shape[0]],
                out=out.pointer + start * out.dtype.itemsize,
                out_stride=out.shape[1],
            )
            choice.candidate.launch(self.device, problem, choice.plan, operands)
        return True

    def _choices(
        self, x: Tensor, weight: LinearWeight, out: Tensor, around: Around, *, from_x: bool
    ) -> list[tuple[Fp8Problem, Choice]] | None:
        """Of every part; None where one has none."""
        chosen = []
        starts = accumulate((part.shape[0] for part in weight.parts), initial=0)
        for part, start in zip(weight.parts, starts, strict=False):
            address, row_bytes = out.pointer + start * out.dtype.itemsize, out.shape[1] * out.dtype.itemsize
            if (address | row_bytes) % (2 * out.dtype.itemsize):
                return None
            problem = Fp8Problem(
                num_rows=x.shape[0],
                weight_rows=part.shape[0],
                in_features=x.shape[1],
                dtype=cuda_type(x.dtype),
                out_dtype=cuda_type(out.dtype),
                groups=format_of(part).block is not None,
                gated=around.gated,
                accumulates=around.accumulates,
                biased=weight.bias is not None,
                from_x=from_x,
                normed=around.norm is not None,
                out_aligned=(address | row_bytes) % WIDE_BYTES == 0,
                in_order=self.batch_invariant,
            )
            choice = self.fp8_kernels.choose(problem)
            if choice is None:
                return None
            chosen.append((problem, choice))
        return chosen
