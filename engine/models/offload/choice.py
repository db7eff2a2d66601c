"""Which layers stay in host memory.

A step copies each of them once, two are on the device at a time, so m of them free the memory of m - 2. They are spread
evenly, each the last of its group: while the other layers of a group are computed, its copy goes on, and the last copy
ends as close to the step's end as it can.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_SLOTS = 2  # layers that are on the device at a time
LEAST_LAYERS = NUM_SLOTS + 1  # of fewer, none would be freed


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """The last layer of each of `count` groups of equal size."""
    return tuple((group + 1) * num_layers // count - 1 for group in range(count))


def layers_within(limit: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The most layers that have at most `limit` bytes together; `sizes`: of all layers."""
    for count in range(len(sizes), 0, -1):
        chosen = spread(count, len(sizes))
        if sum(sizes[index] for index in chosen) <= limit:
            return chosen
    return ()


def layers_beyond(room: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The fewest layers without which the others and the slots have room in `room` bytes; all where none leave it."""
    total = sum(sizes)
    if total <= room:
        return ()
    for count in range(LEAST_LAYERS, len(sizes)):
        chosen = spread(count, len(sizes))
        kept = [sizes[index] for index in chosen]
        if total - sum(kept) + NUM_SLOTS * max(kept) <= room:
            return chosen
    return tuple(range(len(sizes)))
