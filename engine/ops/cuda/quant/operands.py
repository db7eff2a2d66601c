"""Operands of many-row products by a block-quantised weight, whichever kernel computes them."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from tessera.engine.formats import WeightPart
from tessera.engine.tensor import Tensor


class ProductParams(TypedDict):
    """Parameters that all many-row kernels have."""

    codes: Tensor
    headers: Tensor
    bias: Tensor | None
    out: int
    num_rows: int
    out_features: int
    in_features: int
    out_stride: int
    accumulate: bool
    silu_mul: bool


class Sm90Operands(NamedTuple):
    """`out` is the address of the part's first column, its rows `out_stride` elements apart.

    `turned`: x turned, or where it may be; `comes_turned`: it always is. `turns`: the gated result is stored turned,
    where the kernel can. `sums`: room for those of slices.
    """

    x: Tensor
    part: WeightPart
    bias: Tensor | None
    out: int
    out_dtype: str
    out_itemsize: int
    out_stride: int
    turned: Tensor | None = None
    comes_turned: bool = False
    turns: bool = False
    sums: Tensor | None = None

    def params(self, *, gated: bool, accumulates: bool) -> ProductParams:
        return ProductParams(
            codes=self.part.tensors["codes"],
            headers=self.part.tensors["headers"],
            bias=self.bias,
            out=self.out,
            num_rows=self.x.shape[0],
            out_features=self.part.shape[0],
            in_features=self.x.shape[1],
            out_stride=self.out_stride,
            accumulate=accumulates,
            silu_mul=gated,
        )
