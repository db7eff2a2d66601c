"""What the choice of a kernel depends on in products of e4m3 rows by e4m3 weights, and the table of the kernels."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.formats import Fp8Format, WeightPart
from tessera.engine.ops.cuda.candidates import CandidateTable
from tessera.engine.ops.cuda.neighbours import may_end_half
from tessera.engine.ops.cuda.types import HALF_BYTES
from tessera.engine.tensor import Tensor


class Fp8Operands(NamedTuple):
    """A part of a weight and what it is multiplied by.

    Attributes:
        x, norm, eps: the activations [M, K] of a single row, of which the kernel makes e4m3, after the norm.
        values, scales: several rows [M, K] as e4m3, and their scales [1 or ceil(K / 128), M].
        part: of the weight, [N, K].
        bias: [N].
        out: the address of the part's first column of the result; its rows lie `out_stride` elements apart.
    """

    x: Tensor | None
    norm: Tensor | None
    eps: float
    values: Tensor | None
    scales: Tensor | None
    part: WeightPart
    bias: Tensor | None
    out: int
    out_stride: int


class Fp8Problem(NamedTuple):
    """A product, perhaps with the gated activation (SiLU) or an addition after it.

    Attributes:
        num_rows, weight_rows, in_features: M, N and K.
        dtype, out_dtype: C names of the activations' and the result's elements.
        groups: scales are of 128 columns, and as many rows of the weight; else of rows and tokens.
        static: the activations' scale is given.
        gated, accumulates, biased: what is around the product.
        from_x: of a single row that is not e4m3 yet, `normed` where the norm comes first.
        out_aligned: the result's rows begin at multiples of 16 bytes; else of two elements.
        in_order: sums in one order, whatever the number of rows.
    """

    num_rows: int
    weight_rows: int
    in_features: int
    dtype: str
    out_dtype: str
    groups: bool
    gated: bool
    accumulates: bool
    biased: bool
    from_x: bool
    normed: bool
    out_aligned: bool
    in_order: bool

    @property
    def features(self) -> int:
        """Of the result."""
        return self.weight_rows // 2 if self.gated else self.weight_rows

    @property
    def ends_half(self) -> bool:
        return may_end_half(self.accumulates, self.normed, self.gated, self.biased)

    @property
    def out_itemsize(self) -> int:
        return 4 if self.out_dtype == "float" else HALF_BYTES


def format_of(part: WeightPart) -> Fp8Format:
    assert isinstance(part.format, Fp8Format)
    return part.format


FP8_LINEAR: CandidateTable[Fp8Problem, Fp8Operands] = CandidateTable("fp8 linear")
