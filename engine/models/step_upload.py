"""All of a step's small arrays in one copy to the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.tensor import Device, Tensor

ALIGNMENT = 64


class StepUpload:
    """Host and device memory of equal size: `put` arrays, then `submit` them in one copy.

    The tensors that `put` returns hold their values from `submit` until the next step's.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._buffer = device.allocate(nbytes)
        self._host = np.zeros(nbytes, np.uint8)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return len(self._host)

    def put(self, array: np.ndarray[Any, Any]) -> Tensor:
        start, stop = self._used, self._used + array.nbytes
        assert stop <= self.nbytes, "a step is larger than the engine's limits"
        self._host[start:stop].view(array.dtype).reshape(array.shape)[...] = array
        self._used = aligned(stop)
        return Tensor(self._buffer, array.shape, array.dtype, start)

    def submit(self) -> None:
        if self._used:
            self._device.upload(self._buffer.pointer, self._host[: min(self._used, self.nbytes)])
        self._used = 0


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
