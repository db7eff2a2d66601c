"""Uploads of many small host arrays in one H2D copy, which goes past larger ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.engine.tensor import Buffer, Device, HostMemory, Mark, Tensor

ALIGNMENT = 64
MAX_PREPARED = 1024
STAGES = 4  # copies in flight while the host fills the next


class StepUpload:
    """Device memory and pinned staging memory of equal size: fill a stage, then `submit` it in one copy.

    The tensors that `stage_array` returns hold their values from `submit` until the next one, in the order of the
    device's stream; the host does not wait.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.buffer: Buffer = device.allocate(nbytes)
        count = STAGES if device.asynchronous else 1
        self._stages: list[tuple[HostMemory, Mark]] = [(device.pinned(nbytes), device.event()) for _ in range(count)]
        self._writers: list[object] = [None] * count
        self._copies: dict[tuple[int, int], Callable[[], None]] = {}  # prepared, by stage and bytes
        self._index = 0
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def next_stage(self) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Number and memory of the stage to fill; waits until its last copy is done."""
        memory, copied = self._stages[self._index]
        if not self._used:
            copied.synchronize()
        return self._index, memory.array

    def take_stage(self, writer: object) -> bool:
        """`writer` fills the stage; -> whether it was the last to do so, and finds there what it left."""
        was_last = self._writers[self._index] is writer
        self._writers[self._index] = writer
        return was_last

    def stage_array(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Copy `array` to the stage; -> the tensor that it becomes with `submit`."""
        _, staged = self.next_stage()
        start, stop = self._used, self._used + array.nbytes
        assert stop <= self.nbytes, "a step is larger than the engine's limits"
        staged[start:stop].view(array.dtype).reshape(array.shape)[...] = array
        self._used = aligned(stop)
        self._writers[self._index] = None
        return Tensor(self.buffer, array.shape, array.dtype, start)

    def submit(self, nbytes: int | None = None) -> None:
        """Copy the staged arrays, or the first `nbytes` of the stage, to the device."""
        used = self._used if nbytes is None else nbytes
        if used:
            memory, copied = self._stages[self._index]
            size = min(used, self.nbytes)
            if nbytes is None:
                self._device.upload_small(self.buffer.pointer, memory.array[:size])
            else:
                self._prepared(size)()
            copied.record()
            self._index = (self._index + 1) % len(self._stages)
        self._used = 0

    def _prepared(self, nbytes: int) -> Callable[[], None]:
        """The copy of the first `nbytes` of the stage, which steps of one shape have in common."""
        key = self._index, nbytes
        found = self._copies.get(key)
        if found is None:
            if len(self._copies) >= MAX_PREPARED:
                self._copies.clear()
            array = self._stages[self._index][0].array[:nbytes]
            found = self._copies[key] = self._device.prepared_upload(self.buffer.pointer, array)
        return found


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
