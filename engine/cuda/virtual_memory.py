"""Device memory whose bytes can leave the device while its addresses stay, so that CUDA graphs that name them live on.

An address range is reserved once. Physical memory is mapped there, and is unmapped while the model sleeps; see "Virtual
Memory Management" in the CUDA driver API.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from cuda.bindings import driver

from tessera.engine.contract.errors import DeviceError
from tessera.engine.contract.machine import available_memory
from tessera.engine.cuda.driver import check
from tessera.engine.cuda.memory import PinnedBuffer

GIB = 2**30
LEAST_BYTES = 2**20  # of a piece that is worth the 2 MiB that the driver maps at a time


class VirtualMemory:
    """Pieces of device memory that are taken away and brought back together.

    Attributes:
        is_released: no piece can be used.
    """

    least_bytes = LEAST_BYTES

    def __init__(self, index: int, activate: Callable[[], object]) -> None:
        """On CUDA device `index`. Raises: DeviceError."""
        activate()
        self.is_released = False
        self._activate = activate
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self._properties: Any = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access: Any = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        finest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(check(driver.cuMemGetAllocationGranularity, self._properties, finest))
        self._sizes: dict[int, int] = {}  # by address
        self._mapped: set[int] = set()
        self._contents: dict[int, PinnedBuffer] = {}

    def allocate(self, nbytes: int) -> int:
        """The address of a new piece. Raises: OutOfMemoryError."""
        self._activate()
        size = -(-nbytes // self._granularity) * self._granularity
        pointer = int(check(driver.cuMemAddressReserve, size, 0, 0, 0))
        try:
            self._map(pointer, size)
        except DeviceError:
            check(driver.cuMemAddressFree, pointer, size)
            raise
        self._sizes[pointer] = size
        return pointer

    def holds(self, pointer: int) -> bool:
        """Whether a piece begins there."""
        return pointer in self._sizes

    def free(self, pointer: int) -> None:
        self._activate()
        size = self._sizes.pop(pointer)
        self._contents.pop(pointer, None)
        self._unmap(pointer, size)
        check(driver.cuMemAddressFree, pointer, size)

    def kept_bytes(self, dropped: Collection[int]) -> int:
        """Host memory that `release` takes."""
        return sum(size for pointer, size in self._sizes.items() if pointer not in dropped)

    def release(self, dropped: Collection[int]) -> None:
        """Give the memory back to the device, with its contents in page-locked host memory.

        Those of pieces that begin at the addresses in `dropped` are lost. The host memory stays for the next time: it
        takes longer to lock than to fill.

        Raises: DeviceError, MemoryError, with nothing changed.
        """
        self._activate()
        kept = [pointer for pointer in self._sizes if pointer not in dropped]
        missing = sum(self._sizes[pointer] for pointer in kept if pointer not in self._contents)
        available = available_memory()
        if available is not None and missing > available:
            raise MemoryError(
                f"{missing / GIB:.1f} GiB of host memory are needed, but only {available / GIB:.1f} are available"
            )
        for pointer in kept:
            if pointer not in self._contents:
                self._contents[pointer] = PinnedBuffer(self._sizes[pointer], self._activate)
        check(driver.cuCtxSynchronize)
        # First what is dropped: the driver clears memory that it takes back, and whoever asks for it waits for that.
        others = [pointer for pointer in self._sizes if pointer in dropped]
        try:
            for pointer in others:
                self._unmap(pointer, self._sizes[pointer])
            for pointer in kept:
                check(driver.cuMemcpyDtoHAsync, _address(self._contents[pointer]), pointer, self._sizes[pointer], 0)
            check(driver.cuCtxSynchronize)
        except DeviceError:
            for pointer in others:
                if pointer not in self._mapped:
                    self._map(pointer, self._sizes[pointer])
            raise
        self.is_released = True
        for pointer in kept:
            self._unmap(pointer, self._sizes[pointer])

    def restore(self) -> None:
        """Bring all back to where it was; dropped pieces hold anything.

        Raises: OutOfMemoryError, with nothing changed: other work has taken the device's memory.
        """
        self._activate()
        kept_first = sorted(self._sizes, key=lambda pointer: pointer not in self._contents)
        try:
            for pointer in kept_first:  # copies run while the rest is mapped
                self._map(pointer, self._sizes[pointer])
                if pointer in self._contents:
                    contents = _address(self._contents[pointer])
                    check(driver.cuMemcpyHtoDAsync, pointer, contents, self._sizes[pointer], 0)
        except DeviceError:
            check(driver.cuCtxSynchronize)
            for pointer, size in self._sizes.items():
                self._unmap(pointer, size)
            raise
        check(driver.cuCtxSynchronize)
        self.is_released = False

    def _map(self, pointer: int, size: int) -> None:
        handle = check(driver.cuMemCreate, size, self._properties, 0)
        try:
            check(driver.cuMemMap, pointer, size, 0, handle, 0)
        finally:
            check(driver.cuMemRelease, handle)  # the memory lives as long as it is mapped
        self._mapped.add(pointer)
        check(driver.cuMemSetAccess, pointer, size, [self._access], 1)

    def _unmap(self, pointer: int, size: int) -> None:
        if pointer in self._mapped:
            self._mapped.discard(pointer)
            check(driver.cuMemUnmap, pointer, size)


def _address(buffer: PinnedBuffer) -> int:
    return int(buffer.array.__array_interface__["data"][0])
