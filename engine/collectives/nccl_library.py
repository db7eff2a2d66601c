"""NVIDIA's NCCL by ctypes: the few of its functions that ranks need, and its errors.

Types, numbers and signatures are those of nccl.h, of version 2 since 2.10.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ConfigError, DeviceError
from tessera.engine.tensor import bfloat16, float16, float32, int32, uint64

FILE = "libnccl.so.2"
PACKAGE = "nvidia-nccl-cu13"
MULTICAST = "NCCL_NVLS_ENABLE"  # NVLink multicast, which stays off unless the environment says otherwise
DTYPES = {int32: 2, uint64: 5, float16: 6, float32: 7, bfloat16: 9}  # ncclDataType_t
SUM, MAX = 0, 2  # ncclRedOp_t
UNIQUE_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """By which ranks find one another."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (c_void_p,),
    "ncclGetUniqueId": (c_void_p,),
    "ncclCommInitRank": (c_void_p, c_int, UniqueId, c_int),
    "ncclCommAbort": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


class NcclLibrary:
    """The library, from the wheel or from the system."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of another one. Raises: ConfigError where there is none, or it lacks a function."""
        os.environ.setdefault(MULTICAST, "0")
        name = str(path or _in_wheel() or FILE)
        try:
            self._library = ctypes.CDLL(name)
            for function, arguments in SIGNATURES.items():
                getattr(self._library, function).argtypes = arguments
            self._library.ncclGetErrorString.restype = c_char_p
        except (OSError, AttributeError) as error:
            raise ConfigError(f"NCCL was not found; install {PACKAGE} ({error})") from error

    @property
    def version(self) -> tuple[int, int, int]:
        """Such as (2, 28, 9)."""
        found = c_int()
        self.check("ncclGetVersion", byref(found))
        return found.value // 10_000, found.value // 100 % 100, found.value % 100

    def unique_id(self) -> UniqueId:
        """For one rank to make and all ranks to join by."""
        made = UniqueId()
        self.check("ncclGetUniqueId", byref(made))
        return made

    def check(self, function: str, *arguments: Any) -> None:
        """Call a function. Raises: DeviceError with the call and NCCL's description."""
        status = getattr(self._library, function)(*arguments)
        if status:
            reason = self._library.ncclGetErrorString(status).decode()
            raise DeviceError(f"{function} failed: {reason}")

    @contextmanager
    def group(self) -> Iterator[None]:
        """Submit the calls within as one."""
        self.check("ncclGroupStart")
        try:
            yield
        finally:
            self.check("ncclGroupEnd")


class NcclCommunicator:
    """A rank's side of the library. Sizes are in elements; work is submitted to `stream`."""

    def __init__(self, library: NcclLibrary, unique_id: UniqueId, index: int, size: int, stream: int) -> None:
        """In each rank's thread, where its device is current; returns when all ranks have come. Raises: DeviceError."""
        self.library = library
        self._stream = c_void_p(stream)
        self._handle = c_void_p()
        library.check("ncclCommInitRank", byref(self._handle), size, unique_id, index)

    def all_reduce(self, pointer: int, size: int, dtype: np.dtype[Any], operation: int) -> None:
        """In place."""
        arguments = size, DTYPES[dtype], operation, self._handle, self._stream
        self.library.check("ncclAllReduce", pointer, pointer, *arguments)

    def broadcast(self, pointer: int, size: int, dtype: np.dtype[Any]) -> None:
        """From rank 0, in place."""
        arguments = size, DTYPES[dtype], 0, self._handle, self._stream
        self.library.check("ncclBroadcast", pointer, pointer, *arguments)

    def send(self, pointer: int, size: int, dtype: np.dtype[Any], to: int) -> None:
        """In a group with the other side's `receive`."""
        self.library.check("ncclSend", pointer, size, DTYPES[dtype], to, self._handle, self._stream)

    def receive(self, pointer: int, size: int, dtype: np.dtype[Any], source: int) -> None:
        """In a group with the other side's `send`."""
        self.library.check("ncclRecv", pointer, size, DTYPES[dtype], source, self._handle, self._stream)

    def abort(self) -> None:
        """End what waits for other ranks; from any thread. Nothing may be submitted afterwards."""
        self.library.check("ncclCommAbort", self._handle)


def _in_wheel() -> Path | None:
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or []) if package is not None else []:
        path = Path(place) / "nccl" / "lib" / FILE
        if path.is_file():
            return path
    return None
