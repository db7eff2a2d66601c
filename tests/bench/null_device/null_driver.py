"""A driver that computes nothing, for measuring the host. It imports none of the project's modules by itself."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cuda.bindings import driver

GIB = 1 << 30
TENSOR_MAP = (ctypes.c_char * 256)()
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
}


class NullDriver:
    """Functions of the driver that succeed at once. Memory is the host's, kernels are not run but those that copy."""

    def __init__(self) -> None:
        self._memory: list[mmap.mmap] = []
        self._functions: dict[str, Callable[..., Any]] = {
            "cuMemAlloc": self._allocate,
            "cuMemHostAlloc": self._allocate,
            "cuMemGetInfo": lambda: (0, 8 * GIB, 8 * GIB),
            "cuDeviceTotalMem": lambda _: (0, 8 * GIB),
            "cuMemcpyHtoDAsync": _copy,
            "cuMemcpyDtoHAsync": _copy,
            "cuModuleGetFunction": lambda _, name: (0, name),
            "cuTensorMapEncodeTiled": lambda *_: (0, SimpleNamespace(getPtr=lambda: ctypes.addressof(TENSOR_MAP))),
            "cuDeviceGetName": lambda *_: (0, b"none\0"),
            "cuDeviceGetAttribute": _attribute,
            "cuLaunchKernel": _launch,
        }
        made = ("cuStreamCreate", "cuEventCreate", "cuGraphInstantiate", "cuStreamEndCapture", "cuModuleLoadData")
        found = ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuFuncGetAttribute", "cuOccupancyMaxActiveClusters")
        self._functions |= dict.fromkeys((*made, *found), lambda *_: (0, 1))

    def install(self, package: str = "tessera.engine") -> None:
        """For good: what is freed when the process ends calls it, too. `package`: the engine's name."""
        for name in dir(driver):
            if name.startswith("cu") and name[2:3].isupper() and not isinstance(getattr(driver, name), type):
                mock.patch.object(driver, name, self._functions.get(name, lambda *_: (0,))).start()
        found = import_module(f"{package}.cuda.driver").FoundDevice(True, "none")
        for module in ("device", "driver"):
            mock.patch(f"{package}.cuda.{module}.find_device", return_value=found).start()
        cubin = import_module(f"{package}.cuda.cache").Cubin

        def compile_nothing(_: Any, program: Any) -> Any:
            return cubin(b"", {name: name.split("<")[0] for name in program.names})

        mock.patch(f"{package}.cuda.compiler.Compiler.compile", compile_nothing).start()

    def _allocate(self, nbytes: int, _flags: int = 0) -> tuple[int, int]:
        self._memory.append(mmap.mmap(-1, max(nbytes, 1)))
        return 0, ctypes.addressof(ctypes.c_char.from_buffer(self._memory[-1]))


def _copy(target: int, source: int, nbytes: int, _stream: Any) -> tuple[int]:
    ctypes.memmove(target, source, nbytes)
    return (0,)


def _attribute(attribute: Any, _device: Any) -> tuple[int, int]:
    return 0, ATTRIBUTES.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1 << 31)


def _launch(function: bytes, *around: Any) -> tuple[int]:
    if function == b"copy_bytes_kernel":
        source, target, size = _parameters(around[-2])
        ctypes.memmove(target.value, source.value, size.value)
    return (0,)


@lru_cache(maxsize=1024)
def _parameters(address: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64.from_address(place or 0) for place in (ctypes.c_void_p * 3).from_address(address)]
