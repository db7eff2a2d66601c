"""Small host arrays on their way to the device, many in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.tensor import Buffer, Device, HostMemory, Mark, Tensor

ALIGNMENT = 64
STAGES = 4  # copies that may be on their way while the host fills the next


class StepUpload:
    """Device memory and staging memory of equal size: fill a stage, then `submit` it in one copy.

    The tensors that `put` returns hold their values from `submit` until the next one, in the order of the
    device's work; the host may go on at once.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.buffer: Buffer = device.allocate(nbytes)
        count = STAGES if device.asynchronous else 1
        self._stages: list[tuple[HostMemory, Mark]] = [(device.pinned(nbytes), device.event()) for _ in range(count)]
        self._index = 0
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def stage(self) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
        """The number and the memory of the stage to fill now; waits until its last copy is done."""
        memory, copied = self._stages[self._index]
        if not self._used:
            copied.synchronize()
        return self._index, memory.array

    def put(self, array: np.ndarray[Any, Any]) -> Tensor:
        _, staged = self.stage()
        start, stop = self._used, self._used + array.nbytes
        assert stop <= self.nbytes, "a step is larger than the engine's limits"
        staged[start:stop].view(array.dtype).reshape(array.shape)[...] = array
        self._used = aligned(stop)
        return Tensor(self.buffer, array.shape, array.dtype, start)

    def submit(self, nbytes: int | None = None) -> None:
        """Copy what was put, or the first `nbytes` of the stage."""
        used = self._used if nbytes is None else nbytes
        if used:
            memory, copied = self._stages[self._index]
            self._device.upload_async(self.buffer.pointer, memory.array[: min(used, self.nbytes)])
            copied.record()
            self._index = (self._index + 1) % len(self._stages)
        self._used = 0


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
