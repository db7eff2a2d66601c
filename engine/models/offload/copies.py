"""Copies of layers from host memory to slots on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tessera.engine.tensor import Device, Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class LayerCopies(Protocol):
    """Copies beside the steps, into one of `slots`, in the order of the calls.

    All of it can be captured: the same calls copy from the same memory to the same slot.
    """

    def fetch(self, source: Bytes, slot: int) -> None:
        """Submit a copy that begins once all that was submitted to the device before is done."""

    def hold_step(self, slot: int) -> None:
        """What is submitted from now on begins when the last copy into the slot is done."""


class ArrayCopies:
    """Copies on a device whose memory is host memory: done when they return."""

    def __init__(self, device: Device, slots: Sequence[Tensor]) -> None:
        self._device = device
        self._slots = slots

    def fetch(self, source: Bytes, slot: int) -> None:
        self._device.upload(self._slots[slot].pointer, source)

    def hold_step(self, slot: int) -> None:
        pass
