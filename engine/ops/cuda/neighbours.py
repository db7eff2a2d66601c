"""Which blocks of one row's products find room beside each other on a multiprocessor.

A decode step of one row is a chain of products, each of which starts while the one before still runs: its rings fill
meanwhile. A block starts where a multiprocessor has shared memory left. Of a layer's products those that end a half of
it ask for more than half of that, so that no multiprocessor gets two of their blocks and another none: attention has
blocks on a few alone, and two of a kind there would lead to two of the next, and so on to the end of the step. All
others fit beside them, and follow one that has a block everywhere, so that there is room for one of their blocks on
each. Where the hidden size is too small for a block everywhere, it is the others that ask for half: two of them would
share what those left free.
"""

from __future__ import annotations

from tessera.engine.ops.cuda.types import ceil_div

RESERVED_BYTES = 1280  # that a block takes beside what it asks for, by the driver and as static arrays
UNIT = 8  # features of the result: a block has as many or more


def may_end_half(accumulates: bool, *around: bool) -> bool:
    """Whether a product is the last of attention or of an MLP, or may be as nothing else is `around` it: in layers
    without a norm before, the last product of a half adds nothing to the residual stream.
    """
    return accumulates or not any(around)


def asks_half(features: int, in_features: int, multiprocessors: int, *, ends_half: bool) -> bool:
    """Whether a product [features, in_features] that ends a half of a layer, or another, asks for half."""
    hidden = features if ends_half else in_features
    return ends_half == (ceil_div(hidden, UNIT) >= multiprocessors)


def most_bytes(shared_bytes: int, *, has_half: bool) -> int:
    """That a block may use; `shared_bytes` are those that a block can have."""
    half = shared_bytes // 2
    return half if has_half else half - RESERVED_BYTES


def asked_bytes(used_bytes: int, shared_bytes: int, *, has_half: bool) -> int:
    """Shared memory that a launch asks for."""
    return max(used_bytes, shared_bytes // 2) if has_half else used_bytes
