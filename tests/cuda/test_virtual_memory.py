"""Memory that leaves the device and comes back, with a driver in host memory: contents, addresses, accounts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tessera.engine.contract.errors import DeviceError, OutOfMemoryError
from tessera.engine.cuda import virtual_memory
from tessera.engine.cuda.memory import MemoryPool
from tessera.engine.cuda.virtual_memory import VirtualMemory
from tessera.engine.tensor import CPU

PAGE = 2**21
GARBAGE = 0xAB


class HostDriver:
    """Ranges are host arrays; what is mapped anew holds garbage."""

    def __init__(self) -> None:
        self.ranges: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.capacity = 64 * PAGE
        self.num_handles = 0

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[int, int]:
        return 0, PAGE

    def cuMemAddressReserve(self, size: int, *others: int) -> tuple[int, int]:
        memory = np.zeros(size, np.uint8)
        self.ranges[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemAddressFree(self, pointer: int, size: int) -> tuple[int]:
        assert pointer not in self.mapped, "it must be unmapped first"
        assert len(self.ranges.pop(pointer)) == size
        return (0,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, Any]:
        if sum(self.mapped.values()) + size > self.capacity:
            raise OutOfMemoryError("cuMemCreate failed")  # as `check` makes of the driver's status
        self.num_handles += 1
        return 0, size

    def cuMemRelease(self, handle: Any) -> tuple[int]:
        self.num_handles -= 1
        return (0,)

    def cuMemMap(self, pointer: int, size: int, offset: int, handle: Any, flags: int) -> tuple[int]:
        assert pointer not in self.mapped
        self.mapped[pointer] = size
        self.ranges[pointer][:] = GARBAGE
        return (0,)

    def cuMemSetAccess(self, pointer: int, size: int, access: list[Any], count: int) -> tuple[int]:
        return (0,)

    def cuMemUnmap(self, pointer: int, size: int) -> tuple[int]:
        assert self.mapped.pop(pointer) == size
        return (0,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[int]:
        assert self.mapped[source] == nbytes
        CPU.copy(target, source, nbytes)
        return (0,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[int]:
        assert self.mapped[target] == nbytes
        CPU.copy(target, source, nbytes)
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    made = HostDriver()
    monkeypatch.setattr(virtual_memory, "driver", made)
    monkeypatch.setattr(
        virtual_memory, "PinnedBuffer", lambda size, activate: SimpleNamespace(array=np.zeros(size, np.uint8))
    )
    return made


def fill(host: HostDriver, pointer: int, value: int) -> None:
    host.ranges[pointer][:] = value


def test_contents_come_back_to_their_addresses_twenty_times(host: HostDriver) -> None:
    memory = VirtualMemory(0, lambda: None)
    pieces = [memory.allocate(size) for size in (PAGE, 3 * PAGE - 5, 1)]
    scratch = memory.allocate(5 * PAGE)
    assert memory.kept_bytes([scratch]) == 5 * PAGE
    for number, pointer in enumerate(pieces):
        fill(host, pointer, number + 1)
    for cycle in range(20):
        memory.release([scratch])
        assert not host.mapped, "all of it is given back"
        memory.restore()
        for number, pointer in enumerate(pieces):
            assert (host.ranges[pointer] == number + 1 + (cycle if number == 0 else 0)).all()
        fill(host, pieces[0], cycle + 2)  # what has changed is kept as well
        assert len(host.mapped) == len(host.ranges) == 4
        assert len(memory._contents) == 3, "no host memory is taken for what is dropped"
    assert host.num_handles == 0


def test_what_others_have_taken_leaves_all_as_it_was(host: HostDriver) -> None:
    memory = VirtualMemory(0, lambda: None)
    pieces = [memory.allocate(4 * PAGE) for _ in range(3)]
    for pointer in pieces:
        fill(host, pointer, 7)
    memory.release([])
    host.capacity = 9 * PAGE
    with pytest.raises(OutOfMemoryError):
        memory.restore()
    assert not host.mapped
    assert memory.is_released
    host.capacity = 64 * PAGE
    memory.restore()
    assert all((host.ranges[pointer] == 7).all() for pointer in pieces)


def test_without_host_memory_nothing_is_given_back(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = VirtualMemory(0, lambda: None)
    pointer = memory.allocate(PAGE)
    fill(host, pointer, 9)
    monkeypatch.setattr(virtual_memory, "available_memory", lambda: PAGE - 1)
    with pytest.raises(MemoryError, match="host memory are needed"):
        memory.release([])

    def refused(size: int, activate: Any) -> Any:
        raise DeviceError("cuMemHostAlloc failed")

    monkeypatch.setattr(virtual_memory, "available_memory", lambda: None)
    monkeypatch.setattr(virtual_memory, "PinnedBuffer", refused)
    with pytest.raises(DeviceError):
        memory.release([])
    assert (host.ranges[pointer] == 9).all()
    assert not memory.is_released


def test_a_pool_has_its_large_pieces_there_and_frees_them(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    small: list[int] = []

    def allocate(size: int) -> tuple[int, int]:
        small.append(size)
        return 0, 4096 * len(small)

    monkeypatch.setattr("tessera.engine.cuda.memory.driver", SimpleNamespace(cuMemAlloc=allocate))
    pool = MemoryPool(lambda: None)
    pool.source = VirtualMemory(0, lambda: None)
    kept = pool.allocate(1000)
    large = pool.allocate(100 * 2**20)
    medium = pool.allocate(3 * 2**20)
    assert (small, len(host.mapped)) == ([1024], 2)
    del large
    assert len(host.mapped) == 1
    del medium
    pool.empty_cache()
    assert not host.mapped
    assert not host.ranges
    del kept
