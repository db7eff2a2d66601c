"""Numbers as integers from -127 to 127 with a scale for each group of a row, in the arithmetic of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Int8Codes(NamedTuple):
    """Integers [rows, K] and their scales [rows, groups] float32, of `group` columns each."""

    integers: Array
    scales: Array
    group: int

    @classmethod
    def of(cls, numbers: Array, group: int) -> Int8Codes:
        """A scale makes the largest magnitude 127, and is a normal float; it is not finite where a number is not."""
        rows, columns = numbers.shape
        groups = -(-columns // group)
        padded = np.zeros((rows, groups * group), np.float32)
        padded[:, :columns] = numbers
        parts = padded.reshape(rows, groups, group)
        with np.errstate(invalid="ignore", over="ignore"):
            largest = np.abs(parts).max(axis=2)
            scales = np.maximum((largest / np.float32(127)).astype(np.float32), np.finfo(np.float32).tiny)
            scales[largest == 0] = 1
            scaled = parts * (np.float32(1) / scales)[:, :, None]
            integers = np.where(np.isfinite(scaled), np.rint(scaled), 0).astype(np.int32)
        return cls(integers.reshape(rows, -1)[:, :columns], scales, group)

    @property
    def numbers(self) -> Array:
        """[rows, K] float32, what the codes stand for."""
        scales = np.repeat(self.scales, self.group, axis=1)[:, : self.integers.shape[1]]
        return self.integers.astype(np.float32) * scales

    def product(self, weight: Int8Codes) -> Array:
        """[M, N] float64, with a weight of one scale a row."""
        total = np.zeros((len(self.integers), len(weight.integers)))
        for place in range(self.scales.shape[1]):
            columns = slice(place * self.group, (place + 1) * self.group)
            sums = self.integers[:, columns].astype(np.float64) @ weight.integers[:, columns].T
            total += sums * self.scales[:, place, None]
        return total * weight.scales[:, 0]
