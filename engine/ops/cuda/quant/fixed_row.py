"""A single row in fixed point, and the shared memory that blocks of its products leave each other."""

from __future__ import annotations

from tessera.engine.formats import PackedFormat
from tessera.engine.ops.cuda.types import HALF_BYTES

NO_INTEGERS = ("Fp8", "Nf4")  # kernel types whose values are none: they are multiplied otherwise
GROUP = 32  # elements of the row that share a scale
WORD_BYTES = 4
NEIGHBOUR_BYTES = 1280  # that a block takes beside what it asks for, by the driver and as static arrays


def has_integers(format: PackedFormat) -> bool:
    return not format.kernel_type.startswith(NO_INTEGERS)


def row_bytes(format: PackedFormat, columns: int) -> int:
    """Of whole steps, with the scale of each group and its sums, one for each scale of the weight's."""
    of_group = 2 * WORD_BYTES if format.scale_elements == GROUP else 4 * WORD_BYTES
    return columns * HALF_BYTES + columns // GROUP * of_group


def asked_bytes(used: int, shared_limit: int, *, accumulates: bool) -> int:
    """What a launch asks for, so that each multiprocessor gets one of its blocks.

    A product without a residual stream follows one that left the same room on all multiprocessors, and needs no more
    than it uses. One with it may follow attention, which has blocks on a few alone: it asks for half, or two of its
    blocks would share an idle multiprocessor, and the next product's be left those that have none.
    """
    return max(used, shared_limit // 2) if accumulates else used


def neighbours_room(shared_limit: int, *, normed: bool) -> int:
    """What blocks of a product may use where a block of the one before or behind it has half: one has the residual
    stream, the other a norm."""
    return shared_limit // 2 - (NEIGHBOUR_BYTES if normed else 0)
