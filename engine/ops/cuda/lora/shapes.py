"""Which adapters tensor cores multiply, and how those of a shape are divided."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.formats import LoraStack
from tessera.engine.ops.cuda.lora.kernels import LORA_EXPAND_WARPS
from tessera.engine.ops.cuda.types import HALF_BYTES, SEGMENT, aligned
from tessera.engine.tensor import Tensor


class ExpandShape(NamedTuple):
    """Template arguments of `lora_expand_kernel`.

    Attributes:
        groups: of 32 features that a warp takes; halves are of both parts where the activation follows.
        steps: of 16 ranks at a time.
        most_ranks: that it can do; with 16 it does no others.
    """

    groups: int
    steps: int
    most_ranks: int

    def template(self, dtype: str, gated: bool) -> tuple[str, ...]:
        return (dtype, *map(str, self), "true" if gated else "false")

    def features(self, gated: bool) -> int:
        """Of a block, in one part."""
        return LORA_EXPAND_WARPS * self.groups // (2 if gated else 1) * 4 * SEGMENT


EXPAND_SHAPES = (ExpandShape(4, 1, 16), ExpandShape(2, 2, 32), ExpandShape(2, 2, 256))


def expand_shape(max_rank: int) -> ExpandShape:
    if max_rank == EXPAND_SHAPES[0].most_ranks:
        return EXPAND_SHAPES[0]
    return next(shape for shape in EXPAND_SHAPES[1:] if max_rank <= shape.most_ranks)


def fits_tensor_cores(x: Tensor, stack: LoraStack, out: Tensor) -> bool:
    """Whether all rows are whole segments of 2-byte elements."""
    widths = (x.shape[1], stack.a.shape[2], *stack.part_rows)
    whole = x.dtype.itemsize == HALF_BYTES and all(width % SEGMENT == 0 for width in widths)
    fits = stack.a.shape[2] <= EXPAND_SHAPES[-1].most_ranks and out.dtype == x.dtype
    return whole and fits and aligned(16, x, stack.a, stack.b, out)


def part_starts(stack: LoraStack) -> tuple[int, int]:
    """The first features of parts 1 and 2, the number of features where there is none."""
    second = stack.part_rows[0]
    return second, second + sum(stack.part_rows[1:2])
