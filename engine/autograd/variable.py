"""A tensor that takes part in a differentiation."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.engine.tensor import Tensor


@dataclass(eq=False)
class Variable:
    """A value and, after a backward, its gradient.

    Attributes:
        requires_grad: a backward computes the gradient.
        gradient: of the values' shape, on their device. Of a leaf it is float32, and each backward adds to it until it
            is set to None; of a result it is gone once the backward has used it.
        is_leaf: made by the caller, not by an operation.
    """

    value: Tensor
    requires_grad: bool = False
    gradient: Tensor | None = None
    is_leaf: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __repr__(self) -> str:
        return f"Variable({self.value!r}{', requires_grad' if self.requires_grad else ''})"
