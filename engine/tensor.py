"""Tensors that live on a device.

A `Tensor` is a contiguous row-major view of a `Buffer`; it owns nothing but keeps its buffer alive.
A `Device` makes buffers and moves bytes. `CpuDevice` is here; `CudaDevice` is in `engine/cuda`.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from engine.errors import TesseraError

float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
int32 = np.dtype(np.int32)
uint32 = np.dtype(np.uint32)
uint64 = np.dtype(np.uint64)
uint8 = np.dtype(np.uint8)

FLOAT_DTYPES = (float32, float16, bfloat16)


class Mark(Protocol):
    """A point in the order of a device's work, passed once all that was submitted before `record` is done."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class HostMemory(Protocol):
    """Attributes: array: [nbytes] uint8; it and its views keep the memory alive."""

    array: np.ndarray[Any, np.dtype[np.uint8]]


class Device(ABC):
    """Where tensors live.

    Attributes:
        name: `cpu` or `cuda:<index>`.
        asynchronous: work that is submitted runs while the host goes on.
    """

    name: str
    asynchronous: bool

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer:
        """`nbytes` of uninitialised memory, aligned to 256 bytes; freed when the buffer dies.

        Raises: OutOfMemoryError.
        """

    @abstractmethod
    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Host array (contiguous) to device memory at `pointer`."""

    @abstractmethod
    def download(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        """Device memory at `pointer` into a contiguous host array; returns when it is there."""

    @abstractmethod
    def pinned(self, nbytes: int) -> HostMemory:
        """Host memory for `upload_async` and `download_async`."""

    @abstractmethod
    def upload_async(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Submit a copy from contiguous `pinned` memory, which must stay unchanged until it is done."""

    @abstractmethod
    def download_async(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        """Submit a copy into contiguous `pinned` memory, which holds it once a later event is passed."""

    @abstractmethod
    def event(self) -> Mark:
        """A mark to put into the order of submitted work."""

    @abstractmethod
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Between two places on this device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all work submitted to the device is done."""

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Buffer:
    """A piece of one device's memory; `owner` is whatever frees it when collected."""

    device: Device
    pointer: int
    nbytes: int
    owner: Any = field(repr=False)


@dataclass(eq=False)
class Tensor:
    """Contiguous array of `shape` and `dtype` at `offset` bytes into `buffer`."""

    buffer: Buffer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0

    def __post_init__(self) -> None:
        if self.offset < 0 or self.offset + self.nbytes > self.buffer.nbytes:
            raise TesseraError(
                f"tensor {self.shape} {self.dtype} at offset {self.offset} "
                f"exceeds its buffer of {self.buffer.nbytes} bytes"
            )

    @property
    def device(self) -> Device:
        return self.buffer.device

    @property
    def pointer(self) -> int:
        return self.buffer.pointer + self.offset

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: slice | int) -> Tensor:
        """Leading rows `[start:stop]`, or one row (its dimension dropped); a view, never a copy."""
        if not self.shape:
            raise IndexError("a tensor without dimensions has no rows")
        rows = self.shape[0]
        stride = math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(index, slice):
            start, stop, step = index.indices(rows)
            if step != 1:
                raise IndexError("rows can only be sliced with step 1")
            count = max(stop - start, 0)
            return Tensor(self.buffer, (count, *self.shape[1:]), self.dtype, self.offset + start * stride)
        if not -rows <= index < rows:
            raise IndexError(f"row {index} of {rows}")
        return Tensor(self.buffer, self.shape[1:], self.dtype, self.offset + (index % rows) * stride)

    def view(self, *shape: int) -> Tensor:
        """The same elements under another shape of equal size."""
        if math.prod(shape) != self.size:
            raise TesseraError(f"cannot view {self.shape} as {shape}")
        return Tensor(self.buffer, shape, self.dtype, self.offset)

    def numpy(self) -> np.ndarray[Any, Any]:
        """On the CPU the elements themselves (writes are seen by the tensor), elsewhere a copy."""
        if isinstance(self.device, CpuDevice):
            raw: np.ndarray[Any, Any] = self.buffer.owner[self.offset : self.offset + self.nbytes]
            return raw.view(self.dtype).reshape(self.shape)
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            self.device.download(array, self.pointer)
        return array

    def upload(self, array: np.ndarray[Any, Any]) -> None:
        """Overwrite all elements from a host array of the same shape and dtype."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise TesseraError(f"upload of {array.shape} {array.dtype} into {self.shape} {self.dtype}")
        if array.nbytes:
            self.device.upload(self.pointer, np.ascontiguousarray(array))

    def clone(self) -> Tensor:
        copy = empty(self.shape, self.dtype, self.device)
        if self.nbytes:
            self.device.copy(copy.pointer, self.pointer, self.nbytes)
        return copy

    def to(self, device: Device) -> Tensor:
        """Itself if it is on `device` already, else a copy there."""
        return self if device is self.device else from_numpy(self.numpy(), device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if isinstance(self.device, CpuDevice):
            raise AttributeError("a CPU tensor has no __cuda_array_interface__")
        # bfloat16 has no type string of its own; its raw two bytes are passed as such.
        typestr = "<V2" if self.dtype == bfloat16 else self.dtype.str
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
        }

    def __repr__(self) -> str:
        return f"Tensor({self.shape}, {self.dtype}, {self.device})"


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Tensor:
    """Uninitialised tensor on `device`."""
    return Tensor(device.allocate(max(math.prod(shape) * dtype.itemsize, 1)), shape, dtype)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Tensor:
    tensor = empty(shape, dtype, device)
    tensor.upload(np.zeros(shape, dtype))
    return tensor


def from_numpy(array: np.ndarray[Any, Any], device: Device) -> Tensor:
    """A copy of `array` on `device`."""
    tensor = empty(array.shape, array.dtype, device)
    tensor.upload(array)
    return tensor


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
