"""Marks in a device's stream of work, and stretches of it recorded for replay."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from tessera.engine.cuda.driver import check, driver_error

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice


class Event:
    """A point in the stream, passed once all work submitted before `record` is done."""

    def __init__(self, device: CudaDevice, *, timing: bool = False) -> None:
        device.activate()
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT if timing else driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.device = device
        self.handle: Any = check(driver.cuEventCreate, flags)
        weakref.finalize(self, _destroy, device, driver.cuEventDestroy, self.handle).atexit = False

    def record(self, stream: Any = None) -> None:
        """Put it into `stream`, by default the device's."""
        self.device.activate()
        check(driver.cuEventRecord, self.handle, self.device.stream if stream is None else stream)

    def query(self) -> bool:
        """Whether it is passed; does not wait."""
        self.device.activate()
        (status,) = driver.cuEventQuery(self.handle)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status:
            raise driver_error(status, "cuEventQuery", (self.handle,))
        return True

    def synchronize(self) -> None:
        """Return when it is passed."""
        self.device.activate()
        check(driver.cuEventSynchronize, self.handle)

    def milliseconds_since(self, start: Event) -> float:
        """Device time between two events, both made with `timing` and both passed."""
        self.device.activate()
        return float(check(driver.cuEventElapsedTime, start.handle, self.handle))


class Graph:
    """Work recorded by `CudaDevice.capture`, submitted again as a whole by `launch`.

    It replays with the addresses of the recording, and so keeps alive what was allocated in it.
    """

    def __init__(self, device: CudaDevice, graph: Any, allocations: Sequence[object]) -> None:
        self.device = device
        self.handle: Any = check(driver.cuGraphInstantiate, graph, 0)
        self._allocations = tuple(allocations)
        weakref.finalize(self, _destroy, device, driver.cuGraphExecDestroy, self.handle).atexit = False

    def launch(self) -> None:
        self.device.activate()
        check(driver.cuGraphLaunch, self.handle, self.device.stream)


def _destroy(device: CudaDevice, destroy: Any, handle: Any) -> None:
    with device.passing():
        check(destroy, handle)
