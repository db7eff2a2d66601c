"""Counts of values by bucket; apart from the bounds, which the app has without NumPy."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

FEW_VALUES = 16  # that are sooner counted one by one


class Histogram:
    """Counts of values by bucket; a value belongs to the first bound that is not below it."""

    def __init__(self, documentation: str, bounds: tuple[float, ...]) -> None:
        self.documentation = documentation
        self.total = 0.0
        self._bounds = bounds
        self._bounds_array = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    @property
    def counts(self) -> list[int]:
        """Values in each bucket, the last of those beyond all bounds."""
        counts: list[int] = self._counts.tolist()
        return counts

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1  # a fifth of the time of NumPy's search
        self.total += value

    def observe_many(self, values: list[float]) -> None:
        if len(values) <= FEW_VALUES:
            for value in values:
                self.observe(value)
            return
        array = np.array(values, np.float64)
        self._counts += np.bincount(np.searchsorted(self._bounds_array, array), minlength=len(self._counts))
        self.total += float(array.sum())

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, number of values at most that large), as Prometheus has it."""
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, self._counts.cumsum().tolist(), strict=True))
