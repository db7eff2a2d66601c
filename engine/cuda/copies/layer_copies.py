"""Copies of layers from page-locked host memory to slots on the device, on a stream of their own beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import check
from tessera.engine.cuda.events import Event
from tessera.engine.tensor import Tensor


class CudaLayerCopies:
    """`LayerCopies` of `engine.models.offload.copies`.

    In a capture the first `fetch` forks the copies' stream from the step's, which makes each copy a node of the graph,
    and the last `hold_step` joins them: every fetch must be followed by a hold of its slot before the capture ends.
    """

    def __init__(self, device: CudaDevice, slots: Sequence[Tensor]) -> None:
        device.activate()
        self._device = device
        self._slots = slots
        self._stream: Any = check(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._submitted = Event(device)
        self._arrived = [Event(device) for _ in slots]

    def fetch(self, source: np.ndarray[Any, np.dtype[np.uint8]], slot: int) -> None:
        self._submitted.record()
        check(driver.cuStreamWaitEvent, self._stream, self._submitted.handle, 0)
        address = int(source.__array_interface__["data"][0])
        check(driver.cuMemcpyHtoDAsync, self._slots[slot].pointer, address, source.nbytes, self._stream)
        self._arrived[slot].record(self._stream)

    def hold_step(self, slot: int) -> None:
        self._device.wait_for_weights(self._arrived[slot])
