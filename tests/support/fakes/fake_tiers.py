"""KV tiers over copies that are late, files in memory, and faults of both, all decided by a random generator."""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.engine.contract.errors import DeviceError
from tessera.engine.kv_tiers.block_files import BlockHeader, CorruptBlockError
from tessera.engine.kv_tiers.disk_tier import DiskTier
from tessera.engine.kv_tiers.metrics import TierMetrics
from tessera.engine.kv_tiers.published_block import NOWHERE, PublishedBlock
from tessera.engine.kv_tiers.tiers import KVTiers, Parts

Array = np.ndarray[Any, Any]

PARTS = (Parts(), Parts(1, 1, 1, 2), Parts(2, 1, 3, 5))  # of the few blocks that there are here


class LateMark:
    """A copy, which happens when something waits for it, or some looks after it was submitted."""

    def __init__(self, copies: FakeCopies, queue: deque[LateMark], copy: Callable[[], None]) -> None:
        self._copies = copies
        self._queue = queue
        self._copy = copy
        self.is_done = False
        self._looks = copies.rng.choice((0, 0, 1, 3, 8))
        queue.append(self)

    def record(self) -> None:
        raise AssertionError("it is recorded already")

    def query(self) -> bool:
        self._copies.fail_perhaps()
        self._looks -= 1
        if self._looks < 0:
            self.synchronize()
        return self.is_done

    def synchronize(self) -> None:
        """Do it, and all that were submitted before it in its direction."""
        while not self.is_done:
            first = self._queue.popleft()
            first._copy()
            first.is_done = True


class FakeCopies:
    """`BlockCopies` for arrays [num_blocks, ...] in which a fake runner keeps what it stores.

    A copy reads and writes as late as it may, so that whatever overtakes it is seen.
    """

    def __init__(self, rng: random.Random, planes: Sequence[Array], num_slots: int, fault_rate: float = 0.0) -> None:
        self.rng = rng
        self.num_slots = num_slots
        self.fault_rate = fault_rate
        self._planes = [plane.reshape(len(plane), -1).view(np.uint8) for plane in planes]
        self.slot_bytes = sum(plane.shape[1] for plane in self._planes)
        self._slots = np.full((num_slots, self.slot_bytes), 0xEE, np.uint8)
        self._out: deque[LateMark] = deque()
        self._back: deque[LateMark] = deque()

    def fail_perhaps(self) -> None:
        if self.fault_rate and self.rng.random() < self.fault_rate:
            raise DeviceError("a copy has failed")

    def to_host(self, blocks: Sequence[int], slots: Sequence[int], *, goes_on: bool = False) -> LateMark:
        self.fail_perhaps()

        def copy() -> None:
            self._slots[slots] = np.concatenate([plane[blocks] for plane in self._planes], axis=1)

        assert len(set(slots)) == len(slots), "two blocks are copied to one slot"
        return LateMark(self, self._out, copy)

    def to_device(
        self, slots: Sequence[int], blocks: Sequence[int], after: Sequence[Any], *, goes_on: bool = False
    ) -> LateMark:
        self.fail_perhaps()

        def copy() -> None:
            for mark in after:
                mark.synchronize()
            offset = 0
            for plane in self._planes:
                plane[blocks] = self._slots[slots, offset : offset + plane.shape[1]]
                offset += plane.shape[1]

        return LateMark(self, self._back, copy)

    def hold_steps(self, mark: Any) -> None:
        mark.synchronize()

    def slot(self, number: int) -> Array:
        return self._slots[number]


class LateFuture:
    def __init__(self, executor: LateExecutor, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._executor = executor
        self._call = function, arguments
        self._value: Any = None
        self._error: Exception | None = None
        self.has_run = False

    def run(self) -> None:
        function, arguments = self._call
        try:
            self._value = function(*arguments)
        except Exception as error:
            self._error = error
        self.has_run = True

    def done(self) -> bool:
        self._executor.work_perhaps()
        return self.has_run

    def result(self) -> Any:
        assert self.has_run, "nothing waits for a file"
        if self._error is not None:
            raise self._error
        return self._value


class LateExecutor:
    """A thread that does a job at some looks."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._jobs: deque[LateFuture] = deque()

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        self._jobs.append(LateFuture(self, function, arguments))
        return self._jobs[-1]

    def work_perhaps(self) -> None:
        while self._jobs and self._rng.random() < 0.6:
            self._jobs.popleft().run()

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        self._jobs.clear()


class MemoryFiles:
    """`BlockStore` in memory, which outlives engines. Its disk may be full and its files corrupt."""

    def __init__(self, rng: random.Random, *, full_rate: float = 0.0, corrupt_rate: float = 0.0) -> None:
        self._rng = rng
        self._full_rate = full_rate
        self._corrupt_rate = corrupt_rate
        self.files: dict[bytes, tuple[BlockHeader, Array]] = {}

    def write(self, header: BlockHeader, block: Array) -> None:
        if self._rng.random() < self._full_rate:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.files[header.digest] = header, block.copy()

    def read(self, digest: bytes, block: Array) -> BlockHeader:
        if digest not in self.files:
            raise FileNotFoundError(digest.hex())
        header, stored = self.files[digest]
        if self._rng.random() < self._corrupt_rate:
            block[:] = 0xDD
            raise CorruptBlockError("the checksum is wrong")
        block[:] = stored
        return header

    def remove(self, digest: bytes) -> None:
        self.files.pop(digest, None)

    def close(self) -> None:
        pass

    def scan(self) -> Iterator[BlockHeader]:
        for header, _ in self.files.values():
            yield header


def make_fake_tiers(
    rng: random.Random,
    planes: Sequence[Array],
    num_slots: int,
    *,
    fault_rate: float = 0.0,
    files: MemoryFiles | None = None,
    max_files: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
) -> KVTiers:
    """Tiers whose host memory is `num_slots` large, and with `files` a disk of `max_files` blocks."""
    metrics = TierMetrics()
    disk = None
    if files is not None:
        disk = DiskTier(files, max_files, metrics=metrics, reader=LateExecutor(rng), writer=LateExecutor(rng))
    copies = FakeCopies(rng, planes, num_slots, fault_rate)
    parts = PARTS[(num_slots + max_files) % len(PARTS)]
    return KVTiers(copies, disk=disk, metrics=metrics, parts=parts, clock=clock, sleep=lambda seconds: None)


def check_tiers(tiers: KVTiers, published: Sequence[PublishedBlock | None]) -> None:
    """Each slot is in one place, and each block of a tier knows its places. `published`: by block of the device."""
    pool, disk = tiers.pool, tiers.disk
    assert len(pool.free) + len(pool.kept) + len(pool.private) == pool.num_slots, "a slot is lost"
    assert set(pool.free).isdisjoint(pool.kept)
    assert pool.private.isdisjoint({*pool.free, *pool.kept})
    assert not any(pool.pins[slot] for slot in pool.free), "a free slot is in use"
    assert all(pool.pins[slot] for slot in pool.private)
    assert min(pool.pins, default=0) >= 0
    assert all(each.slot == slot for slot, each in pool.kept.items())
    assert all(tiers._by_digest[each.digest] is each for each in pool.kept.values())
    assert len(tiers._by_digest) == len(pool.kept)
    assert all(each.block == block for block, each in enumerate(published) if each is not None)
    on_device = {id(each) for each in published if each is not None}
    assert all((each.block == NOWHERE) == (id(each) not in on_device) for each in pool.kept.values())
    if disk is not None:
        assert len(disk.entries) <= disk.max_blocks
        assert all(each.on_disk for each in disk.entries.values() if isinstance(each, PublishedBlock))


def check_tiers_quiet(tiers: KVTiers, most_looks: int = 1000) -> None:
    """Once all copies and files are done, nothing is in use."""
    tiers.submit()
    for _ in range(most_looks):
        tiers.poll()
        if not (tiers.loads or tiers._storing or tiers._reads or tiers._write_slots):
            break
    else:
        raise AssertionError("a copy has no end")
    assert not any(tiers.pool.pins), "a slot stays in use"
    assert not tiers.pool.private
    assert not tiers._busy
    assert not tiers._storing_slots
