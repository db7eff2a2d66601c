"""A bound on the time that a training takes of a device, by pauses, so that others come to their turn there."""

from __future__ import annotations

import time

from tessera.engine.tensor import Device

INTERVAL = 0.005  # seconds between two looks
LONGEST_PAUSE = 1.0  # seconds


class DeviceShare:
    """Called after each operation, it waits now and then for the device, and then for as long as others are due."""

    def __init__(self, device: Device, share: float) -> None:
        self._device = device
        self._idle_share = (1 - share) / share
        self._since = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._since < INTERVAL:
            return
        self._device.synchronize()
        busy = time.monotonic() - self._since
        time.sleep(min(busy * self._idle_share, LONGEST_PAUSE))
        self._since = time.monotonic()
