"""Device memory in size classes, page-locked host memory, what crosses between them, a kernel for small copies."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from cuda.bindings import driver

from tessera.engine.contract.errors import OutOfMemoryError
from tessera.engine.cuda.driver import check
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Int64, Pointer

SMALLEST_CLASS = 512
LARGEST_POOLED = 32 * 2**20

Passing = Callable[[], AbstractContextManager[None]]  # see `CudaDevice.passing`


@dataclass
class Transfers:
    """Every copy between host and device, so that a test can prove that a forward makes none."""

    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0


@dataclass
class PoolStatistics:
    """Attributes: hits: served from freed memory; misses: asked of the driver; in_use, cached: bytes."""

    hits: int = 0
    misses: int = 0
    in_use: int = 0
    cached: int = 0


class Allocation:
    """Owner of a piece of device memory, which goes back to its pool when this is collected."""

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer


def size_class(nbytes: int, *, pooled: bool = False) -> int:
    """The bytes really taken for `nbytes`: four classes an octave up to 32 MiB, then multiples of 2 MiB.

    So at most a fifth of a pooled piece is unused. `pooled`: of larger pieces eight classes an octave.
    """
    if nbytes <= SMALLEST_CLASS:
        return SMALLEST_CLASS
    bits = (nbytes - 1).bit_length()
    step = 1 << (bits - 3) if nbytes <= LARGEST_POOLED else 1 << (bits - 4) if pooled else 2 * 2**20
    return -(-nbytes // step) * step


class LargeMemory(Protocol):
    """Attributes: least_bytes: smaller pieces are not for it."""

    least_bytes: int

    def allocate(self, nbytes: int) -> int: ...
    def holds(self, pointer: int) -> bool: ...
    def free(self, pointer: int) -> None: ...


class Returns:
    """What finalisers give back to the driver: at once or, while `held`, when `flush` is called.

    The driver takes memory back once all devices are idle. Within a step of several ranks it would wait for a kernel
    that waits for the very rank whose thread collects the garbage.
    """

    def __init__(self, passing: Passing) -> None:
        self.held = False
        self.passing = passing
        self._waiting: list[tuple[Callable[[int], object], int]] = []

    def __call__(self, free: Callable[[int], object], pointer: int) -> None:
        """From any thread and at any point, also by a finaliser."""
        if self.held:
            self._waiting.append((free, pointer))
        else:
            with self.passing():
                free(pointer)

    def flush(self) -> None:
        """Give back what waits; for when no device is at work."""
        with self.passing():
            while self._waiting:
                free, pointer = self._waiting.pop()
                free(pointer)


class MemoryPool:
    """Hands out device memory; what is freed up to 32 MiB is kept for the next of its size class, with `keeps_large`
    what is larger, too.

    All work of a device runs on one stream, so a freed piece may be handed out again at once: what
    the next owner does to it happens after what the last one did. List operations are atomic, so
    that a finaliser may return memory from any thread and at any point.

    Attributes:
        source: where larger pieces are from; None: the driver's allocator, as smaller ones.
        keeps_large: for work that allocates and frees the same large pieces over and over, since the driver waits for
            the device whenever it takes memory back.
    """

    def __init__(self, activate: Callable[[], object], returns: Returns | None = None) -> None:
        """`activate` makes the device's context current."""
        self._activate, self._returns = activate, returns or Returns(partial(_for_good, activate))
        self.source: LargeMemory | None = None
        self.keeps_large = False
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self.statistics = PoolStatistics()

    def allocate(self, nbytes: int) -> Allocation:
        """At least `nbytes`, aligned to 256 bytes.

        Raises: OutOfMemoryError if the driver has not as much even once the cached pieces are freed.
        """
        size = size_class(nbytes, pooled=self.keeps_large)
        try:
            pointer = self._free[size].pop()
            self.statistics.hits += 1
            self.statistics.cached -= size
        except IndexError:
            pointer = self._from_driver(size)
            self.statistics.misses += 1
        self.statistics.in_use += size
        allocation = Allocation(pointer)
        # At interpreter exit the driver is gone before the last objects are: leave the memory to the process's end.
        weakref.finalize(allocation, self._release, pointer, size).atexit = False
        return allocation

    def empty_cache(self) -> None:
        """Give all cached pieces back to the driver."""
        with self._returns.passing():
            for size, pointers in list(self._free.items()):
                while pointers:
                    self._free_now(pointers.pop())
                    self.statistics.cached -= size

    def _release(self, pointer: int, size: int) -> None:
        self.statistics.in_use -= size
        if size > LARGEST_POOLED and not self.keeps_large:
            self._returns(self._free_now, pointer)
        else:
            self._free[size].append(pointer)
            self.statistics.cached += size

    def _from_driver(self, size: int) -> int:
        self._activate()
        try:
            return self._allocate(size)
        except OutOfMemoryError:
            self.empty_cache()
        try:
            return self._allocate(size)
        except OutOfMemoryError:
            free, total = check(driver.cuMemGetInfo)
            raise OutOfMemoryError(
                f"{size / 2**20:.1f} MiB of device memory were asked for, but only {free / 2**20:.1f} MiB "
                f"of {total / 2**20:.1f} MiB are free"
            ) from None

    def _allocate(self, size: int) -> int:
        if self.source is not None and size > self.source.least_bytes:
            return self.source.allocate(size)
        return int(check(driver.cuMemAlloc, size))

    def _free_now(self, pointer: int) -> None:
        if self.source is not None and self.source.holds(pointer):
            self.source.free(pointer)
        else:
            check(driver.cuMemFree, pointer)


class PinnedBuffer:
    """Page-locked host memory, which the device reads and writes while the host does other things.

    Attributes:
        array: [nbytes] uint8. It and every view of it keep the memory alive.
    """

    def __init__(self, nbytes: int, activate: Callable[[], object], returns: Returns | None = None) -> None:
        activate()
        pointer = int(check(driver.cuMemHostAlloc, max(nbytes, 1), 0))
        memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
        returns = returns or Returns(partial(_for_good, activate))
        weakref.finalize(memory, returns, partial(check, driver.cuMemFreeHost), pointer).atexit = False
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.ctypeslib.as_array(memory)

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> np.ndarray[Any, Any]:
        """Array of `shape` and `dtype` at `offset` bytes, a multiple of the dtype's size."""
        return np.ndarray(shape, dtype, self.array, offset)


@contextmanager
def _for_good(activate: Callable[[], object]) -> Iterator[None]:
    activate()
    yield


# Small copies between the device and page-locked memory are made by multiprocessors. A DMA engine may take those of one
# direction one after the other, whatever their streams: a step's inputs, of a few KiB, would wait for all KV blocks
# that were submitted before, 20 ms for a GiB. A kernel's accesses do not queue there.
COPY_THREADS = 256
PIECES = Constant(4, "that a thread has on the bus at a time")
PIECE_TYPES = {16: "uint4", 4: "unsigned", 1: "unsigned char"}  # by size


class CopyBytesParams(NamedTuple):
    source: Annotated[Pointer, "const unsigned char*"]
    target: Annotated[Pointer, "unsigned char*"]
    size: Int64


COPY_BYTES = KernelSpec(
    file="elementwise/copy_bytes.cu",
    name="copy_bytes_kernel",
    template=("Piece",),
    params=CopyBytesParams,
)
SPECS = (COPY_BYTES,)
declare_header("copy_bytes", __name__, {"PIECES": PIECES}, params=(CopyBytesParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched, whatever the dtypes."""
    return [(COPY_BYTES, (piece,)) for piece in PIECE_TYPES.values()]


def piece_bytes(*pointers: int) -> int:
    """The largest piece that can be read and written at these addresses."""
    return next(size for size in PIECE_TYPES if not any(pointer % size for pointer in pointers))


@lru_cache(maxsize=4096)
def copy_config(nbytes: int, piece: int) -> LaunchConfig:
    """Blocks that cover `nbytes`, at least one byte."""
    return LaunchConfig((-(-nbytes // (COPY_THREADS * PIECES * piece)), 1, 1), (COPY_THREADS, 1, 1))
