"""A model that sleeps: its process lives, its memory is others'."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tessera.engine.contract.errors import DeviceError
from tessera.engine.contract.heap import drop_pages
from tessera.engine.tensor import Buffer, CpuDevice, Device

logger = logging.getLogger("tessera.engine")

GIB = 2**30


class ReleasableMemory(Protocol):
    """See `engine.cuda.virtual_memory`."""

    def kept_bytes(self, dropped: Sequence[int]) -> int: ...
    def release(self, dropped: Sequence[int]) -> None: ...
    def restore(self) -> None: ...


class PageMemory:
    """Buffers on the CPU: the weights are in host memory already, the pages of the others go back to the system."""

    def __init__(self, weight_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._weight_bytes = weight_bytes
        self._buffers = buffers

    def kept_bytes(self, dropped: Sequence[int]) -> int:
        return self._weight_bytes

    def release(self, dropped: Sequence[int]) -> None:
        for buffer in self._buffers:
            drop_pages(buffer.pointer, buffer.nbytes)

    def restore(self) -> None:
        pass


class Sleeper:
    """Puts an engine that has no work to sleep, and wakes it up.

    Attributes:
        host_bytes: of host memory, that sleep takes.
    """

    def __init__(self, memory: ReleasableMemory, dropped: Sequence[Buffer], prepare: Callable[[], None]) -> None:
        """`dropped`: buffers whose contents are not needed; `prepare` is called before they are lost."""
        self._memory = memory
        self._dropped = [buffer.pointer for buffer in dropped]
        self._prepare = prepare
        self.host_bytes = memory.kept_bytes(self._dropped)

    def sleep(self) -> None:
        """Weights to host memory, and all of the device's memory away.

        Raises: DeviceError, MemoryError if host memory cannot be had; all is as it was, but for the prefix cache.
        """
        start = time.monotonic()
        self._prepare()
        self._memory.release(self._dropped)
        logger.info(
            "the model sleeps, with %.2f GiB in host memory, after %.2f s",
            *(self.host_bytes / GIB, time.monotonic() - start),
        )

    def wake_up(self) -> None:
        """Raises: OutOfMemoryError if the device's memory is taken."""
        start = time.monotonic()
        self._memory.restore()
        logger.info("the model is awake, after %.2f s", time.monotonic() - start)


def make_sleeper(
    device: Device, dropped: Sequence[Buffer], weight_bytes: int, prepare: Callable[[], None]
) -> Sleeper | None:
    """None where the device's memory cannot be given back."""
    if isinstance(device, CpuDevice):
        return Sleeper(PageMemory(weight_bytes, dropped), dropped, prepare)
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no memory to give back on {device}"
    if device.virtual_memory is None:
        return None
    cuda = device

    def prepare_device() -> None:
        prepare()
        cuda.empty_cache()  # pieces that nothing uses need not be kept

    cuda.empty_cache()
    return Sleeper(device.virtual_memory, dropped, prepare_device)


def make_releasable(device: Device) -> None:
    """Have the device's memory such that it can be given back; where the driver cannot, the log says so once."""
    if isinstance(device, CpuDevice):
        return
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no memory to give back on {device}"
    try:
        device.make_releasable()
    except DeviceError as error:
        logger.warning("a model that sleeps is ended, because the device cannot give memory back: %s", error)
