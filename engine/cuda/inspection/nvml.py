"""How much of a GPU is in use, as the driver's management library (NVML) counts it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from cuda.bindings import driver, nvml

from tessera.engine.cuda.driver import check

logger = logging.getLogger("tessera.gpu")

INTERVAL = 5.0  # seconds between two looks
UUID_KINDS = ("GPU", "MIG")  # a share of a GPU has a UUID of its own


class Usage(NamedTuple):
    """Of the whole device, whoever uses it: bytes, and the share of time in which a kernel ran (0 to 1) if known."""

    memory_used: int
    memory_total: int
    utilization: float | None


class UsageMonitor:
    """Looks at CUDA device `index` every few seconds, in a thread of its own: a look may take long when the driver
    is busy, and neither a step nor a sign of life may wait for it.

    `open_device` makes what looks at a device. `latest` is None before the first look, and for good once one
    failed: without NVML, or where it knows nothing of the device.
    """

    def __init__(self, index: int = 0, open_device: Callable[[int], Callable[[], Usage]] | None = None) -> None:
        self.latest: Usage | None = None
        self._index = index
        self._open_device = open_device or watched_device
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-usage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            look = self._open_device(self._index)
            while True:
                self.latest = look()
                if self._stopping.wait(INTERVAL):
                    return
        except Exception as error:  # of a library that is missing or refuses: serving goes on without these figures
            logger.debug("the GPU's memory and utilisation are not known: %s", error)
            self.latest = None


def watched_device(index: int) -> Callable[[], Usage]:
    """-> what looks at CUDA device `index`. Raises what the bindings raise where NVML cannot be had."""
    nvml.init_v2()
    handle = _handle(index)

    def look() -> Usage:
        memory = nvml.device_get_memory_info_v2(handle)
        try:
            utilization = nvml.device_get_utilization_rates(handle).gpu / 100
        except nvml.NotSupportedError:  # of a share of a GPU
            utilization = None
        return Usage(int(memory.used), int(memory.total), utilization)

    return look


def _handle(index: int) -> int:
    # By UUID: NVML numbers the devices of the machine, CUDA those that this process may see.
    digits = bytes(check(driver.cuDeviceGetUuid, check(driver.cuDeviceGet, index)).bytes).hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    last: nvml.NvmlError | None = None
    for kind in UUID_KINDS:
        try:
            return int(nvml.device_get_handle_by_uuid(f"{kind}-{uuid}"))
        except nvml.NvmlError as error:
            last = error
    assert last is not None
    raise last
