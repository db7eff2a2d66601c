"""Tensors that live on a device: contiguous row-major views of a `Buffer`, which they keep alive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.tensor.cpu import CpuDevice
from tessera.engine.tensor.device import Buffer, Device
from tessera.engine.tensor.dtypes import bfloat16


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
    if tensor.nbytes:
        device.fill_bytes(tensor.pointer, 0, tensor.nbytes)
    return tensor


def from_numpy(array: np.ndarray[Any, Any], device: Device) -> Tensor:
    """A copy of `array` on `device`."""
    tensor = empty(array.shape, array.dtype, device)
    tensor.upload(array)
    return tensor
