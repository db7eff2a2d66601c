"""Copies of KV blocks on the CPU, where the device's memory is host memory too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.engine.tensor import Device, Mark, Tensor


class ArrayCopies:
    """`BlockCopies` whose copies are done when they return.

    Raises: MemoryError.
    """

    def __init__(self, device: Device, planes: Sequence[Tensor], num_slots: int) -> None:
        self._planes = [plane.numpy().reshape(plane.shape[0], -1).view(np.uint8) for plane in planes]
        self.num_slots = num_slots
        self.slot_bytes = sum(plane.shape[1] for plane in self._planes)
        self._mark = device.event()
        self._slots = device.pinned(num_slots * self.slot_bytes).array.reshape(num_slots, self.slot_bytes)

    def to_host(self, blocks: Sequence[int], slots: Sequence[int], *, goes_on: bool = False) -> Mark:
        offset = 0
        for plane in self._planes:
            self._slots[slots, offset : offset + plane.shape[1]] = plane[blocks]
            offset += plane.shape[1]
        return self._mark

    def to_device(
        self, slots: Sequence[int], blocks: Sequence[int], after: Sequence[Mark], *, goes_on: bool = False
    ) -> Mark:
        offset = 0
        for plane in self._planes:
            plane[blocks] = self._slots[slots, offset : offset + plane.shape[1]]
            offset += plane.shape[1]
        return self._mark

    def hold_steps(self, mark: Mark) -> None:
        pass

    def slot(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        row: np.ndarray[Any, np.dtype[np.uint8]] = self._slots[number]
        return row
