"""The CPU as a device: buffers are host memory, and every copy is done when it returns."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.engine.tensor.device import Buffer, Device, HostMemory, Mark


class CpuDevice(Device):
    """Host memory; a buffer's owner is its uint8 array."""

    name = "cpu"
    asynchronous = False

    def allocate(self, nbytes: int) -> Buffer:
        array = np.empty(nbytes, np.uint8)
        return Buffer(self, array.ctypes.data, nbytes, array)

    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        _host_bytes(pointer, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def download(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        array.reshape(-1).view(np.uint8)[:] = _host_bytes(pointer, array.nbytes)

    def pinned(self, nbytes: int) -> HostMemory:
        return _PlainMemory(np.zeros(nbytes, np.uint8))

    def upload_async(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        self.upload(pointer, array)

    def download_async(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        self.download(array, pointer)

    def event(self) -> Mark:
        return _PassedMark()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        _host_bytes(destination, nbytes)[:] = _host_bytes(source, nbytes)

    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None:
        ctypes.memset(pointer, value, nbytes)

    def synchronize(self) -> None:
        pass


@dataclass
class _PlainMemory:
    array: np.ndarray[Any, np.dtype[np.uint8]]


class _PassedMark:
    """What is submitted to the CPU is done at once."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _host_bytes(pointer: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


CPU = CpuDevice()
