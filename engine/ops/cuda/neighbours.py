"""Which blocks of one row's products find room beside each other on a multiprocessor.

A decode step of one row is a chain of products, each of which starts while the one before still runs: its rings fill
meanwhile. A block starts where a multiprocessor has shared memory left. A product that ends a half of a layer asks for
more than half of it, so that no multiprocessor gets two of its blocks and another none: attention has blocks on a few
alone, and two of a kind there would lead to two of the next, and so on to the end of the step. All others fit beside
it. They follow such a product, so that there is room for one of their blocks on each.
"""

from __future__ import annotations

RESERVED_BYTES = 1280  # that a block takes beside what it asks for, by the driver and as static arrays


def most_bytes(shared_bytes: int, *, ends_half: bool) -> int:
    """That a block may use; `shared_bytes` are those that a block can have."""
    half = shared_bytes // 2
    return half if ends_half else half - RESERVED_BYTES


def asked_bytes(used_bytes: int, shared_bytes: int, *, ends_half: bool) -> int:
    """What a launch asks for."""
    return max(used_bytes, shared_bytes // 2) if ends_half else used_bytes
