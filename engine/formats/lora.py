"""Low-rank adapters beside a linear weight (Hu et al. 2021): those of several models, in slots of device memory.

y = x W^T + b + factor * (x A^T) B^T, where A, B and factor are those of the slot that a row of x names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.engine.contract.errors import TesseraError
from tessera.engine.tensor import Tensor, float32, int32


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The slot of each row of a product; below 0: none.

    Attributes:
        slots: [M] int32.
        groups: the rows sorted by slot, where an implementation of the operations needs them; see `Ops.group_rows`.
    """

    slots: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        if self.slots.ndim != 1 or self.slots.dtype != int32:
            raise TesseraError(f"slots of rows must be int32 [M], not {self.slots}")


@dataclass(eq=False)
class AdapterSelection:
    """Which adapters the next products take; all weights of a model share one.

    Attributes:
        ranks: [S] int32, the largest rank in each slot; 0 where it is empty.
        shrunk: float32, of at least M * P * R elements; room for the products with A.
        rows: None: no row has an adapter, and products are as if there were none.
    """

    ranks: Tensor
    shrunk: Tensor
    rows: AdapterRows | None = field(default=None)


@dataclass(frozen=True, eq=False)
class LoraStack:
    """S slots for adapters of one weight [N, K] of P parts, one below the other; R is the largest rank.

    Adapters of smaller ranks, and parts without one, are filled up with zeros.

    Attributes:
        a: [S, P, R, K], b: [S, N, R]: in the activations' dtype.
        factors: [S, P] float32.
        part_rows: of each part; they add up to N.
    """

    a: Tensor
    b: Tensor
    factors: Tensor
    part_rows: tuple[int, ...]
    selection: AdapterSelection

    def __post_init__(self) -> None:
        slots, parts, rank, _ = self.a.shape
        fits = self.b.shape == (slots, sum(self.part_rows), rank) and self.factors.shape == (slots, parts)
        if not fits or parts != len(self.part_rows) or self.factors.dtype != float32 or self.a.dtype != self.b.dtype:
            raise TesseraError(f"a stack of adapters does not fit itself: {self.a}, {self.b}, {self.factors}")

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.factors.nbytes
