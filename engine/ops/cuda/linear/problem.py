"""What the choice of a matrix product's kernel depends on, and the table of the kernels."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.ops.cuda.candidates import CandidateTable
from tessera.engine.ops.cuda.neighbours import may_end_half
from tessera.engine.ops.cuda.types import HALF_BYTES, cuda_type
from tessera.engine.ops.linear_interface import AddedNorm
from tessera.engine.tensor import Tensor

WIDE_BYTES = 16  # of the widest copies

SILU_GATE = Constant(1)
GELU_GATE = Constant(2, "by its tanh approximation")
FUSED_GATES = ("silu_mul", "gelu_tanh_mul")  # that kernels of dense weights have behind the product
declare_header("gates", __name__, {"SILU_GATE": SILU_GATE, "GELU_GATE": GELU_GATE})


class LinearOperands(NamedTuple):
    """x [M, K], norm [K], weight [N, K], bias [N], out [M, N], or [M, N / 2] after a gated activation."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    added: AddedNorm | None = None  # to x, before the norm


class LinearProblem(NamedTuple):
    """A product, perhaps with the norm of x before it and the gated activation or an addition after it.

    Attributes:
        num_rows, features, in_features: of x, of the result, of a row of x.
        dtype, out_dtype: C names of x's and the result's elements.
        normed, gated, accumulates, biased: what is around the product.
        gelu: the gate passes GELU by its tanh approximation instead of SiLU.
        inputs_aligned: x, weight and norm begin at multiples of 16 bytes.
        out_aligned: so does the result; out_in_pairs: at a multiple of two elements.
        bias_in_pairs: the bias begins at a multiple of 4 bytes.
        in_order: sums in ascending groups of 16 elements of k in one chain, whatever the number of rows.
    """

    num_rows: int
    features: int
    in_features: int
    dtype: str
    out_dtype: str
    normed: bool
    gated: bool
    accumulates: bool
    biased: bool
    inputs_aligned: bool
    out_aligned: bool
    out_in_pairs: bool
    bias_in_pairs: bool
    in_order: bool
    gelu: bool = False

    @classmethod
    def of(
        cls,
        operands: LinearOperands,
        *,
        gated: bool = False,
        accumulates: bool = False,
        in_order: bool = False,
        gelu: bool = False,
    ) -> LinearProblem:
        x, weight, bias, out, norm, *_ = operands
        num_rows, in_features = x.shape
        addresses = x.pointer | weight.pointer | (0 if norm is None else norm.pointer)
        out_aligned = out.pointer % WIDE_BYTES == 0
        return cls(
            num_rows,
            out.shape[1],
            in_features,
            cuda_type(x.dtype),
            cuda_type(out.dtype),
            norm is not None,
            gated,
            accumulates,
            bias is not None,
            addresses % WIDE_BYTES == 0,
            out_aligned,
            out_aligned or out.pointer % (2 * out.dtype.itemsize) == 0,
            bias is None or bias.pointer % (2 * HALF_BYTES) == 0,
            in_order,
            gelu,
        )

    @property
    def weight_rows(self) -> int:
        return 2 * self.features if self.gated else self.features

    @property
    def ends_half(self) -> bool:
        return may_end_half(self.accumulates, self.normed, self.gated, self.biased, self.logits)

    @property
    def gate(self) -> int:
        """As kernels take it: 0 without one."""
        return (GELU_GATE if self.gelu else SILU_GATE) if self.gated else 0

    @property
    def is_half(self) -> bool:
        """x and weight have 16-bit elements."""
        return self.dtype != "float"

    @property
    def logits(self) -> bool:
        """The result has wider elements than x."""
        return self.out_dtype != self.dtype

    @property
    def out_itemsize(self) -> int:
        return 4 if self.out_dtype == "float" else HALF_BYTES

    @property
    def in_segments(self) -> bool:
        """Portable kernels may move whole 16-byte segments in and pairs of results out."""
        return self.in_features % 8 == 0 and self.features % 2 == 0 and self.inputs_aligned and self.out_in_pairs


LINEAR: CandidateTable[LinearProblem, LinearOperands] = CandidateTable("linear")
