"""A device: makes buffers, moves bytes. `CpuDevice` is beside this, `CudaDevice` in `engine/cuda`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np


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

    def keep_large_memory(self) -> None:  # noqa: B027  nothing to do where memory is not pooled
        """From now on the same large buffers are allocated and freed over and over."""

    def hold_garbage(self) -> None:  # noqa: B027  nothing to do where memory needs no driver
        """Keep what is collected until `release_garbage`, so that no collection waits for devices at work."""

    def release_garbage(self) -> None:  # noqa: B027
        """Free what was kept, and from now on at once; no device may be at work."""

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

    def upload_small(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """As `upload_async`, for what a step waits for: it does not wait for large copies beside the steps."""
        self.upload_async(pointer, array)

    def download_small(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        """As `download_async`, likewise."""
        self.download_async(array, pointer)

    def prepared_upload(self, pointer: int, array: np.ndarray[Any, Any]) -> Callable[[], None]:
        """`upload_small` of what the array has whenever the result is called, with little left to do then."""
        return partial(self.upload_small, pointer, array)

    @abstractmethod
    def event(self) -> Mark:
        """A mark to put into the order of submitted work."""

    @abstractmethod
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Between two places on this device."""

    def copy_small(self, destination: int, source: int, nbytes: int) -> None:
        """As `copy`, for what a step waits for; see `upload_small`."""
        self.copy(destination, source, nbytes)

    @abstractmethod
    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None:
        """Set every byte of this device's memory from `pointer` on to `value`."""

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
