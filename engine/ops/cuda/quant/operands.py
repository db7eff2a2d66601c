"""Operands of many-row products by a block-quantised weight, whichever kernel computes them."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.formats import WeightPart
from tessera.engine.tensor import Tensor


class Sm90Operands(NamedTuple):
    """`out` is the address of the part's first column, its rows `out_stride` elements apart.

    `turned`: x as `turn` gives it, if it does.
    """

    x: Tensor
    part: WeightPart
    bias: Tensor | None
    out: int
    out_dtype: str
    out_itemsize: int
    out_stride: int
    turned: Tensor | None = None
