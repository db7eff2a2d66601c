"""A single row in fixed point."""

from __future__ import annotations

from tessera.engine.formats import PackedFormat
from tessera.engine.ops.cuda.types import HALF_BYTES

NO_INTEGERS = ("Fp8", "Nf4")  # kernel types whose values are none: they are multiplied otherwise
GROUP = 32  # elements of the row that share a scale
WORD_BYTES = 4


def has_integers(format: PackedFormat) -> bool:
    return not format.kernel_type.startswith(NO_INTEGERS)


def row_bytes(format: PackedFormat, columns: int) -> int:
    """Of whole steps, with the scale of each group and its sums, one for each scale of the weight's."""
    of_group = 2 * WORD_BYTES if format.scale_elements == GROUP else 4 * WORD_BYTES
    return columns * HALF_BYTES + columns // GROUP * of_group
