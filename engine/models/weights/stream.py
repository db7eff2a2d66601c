"""Weights on their way from files to the device: several threads read, convert and copy at the same time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from tessera.engine.tensor import Device, HostMemory, Mark, Tensor

CHUNK_BYTES = 16 << 20  # of the device's memory, at a time and thread
MOST_THREADS = 8

Array = np.ndarray[Any, Any]


class WeightStream:
    """Copies chunks of at most CHUNK_BYTES to the device through page-locked memory, in no order.

    Reading a file's pages, converting them and the bus each take their time; one after the other they would
    add up. On the CPU a chunk is copied at once.
    """

    def __init__(self, device: Device, on_copied: Callable[[int], None]) -> None:
        """`on_copied` is told the bytes of each chunk, in the thread that sends."""
        self._device = device
        self._on_copied = on_copied
        self._pending: deque[Future[int] | Callable[[], None]] = deque()
        count = min(os.cpu_count() or 1, MOST_THREADS) if device.asynchronous else 0
        self._lanes: SimpleQueue[tuple[HostMemory, Mark]] = SimpleQueue()
        for _ in range(2 * count):
            self._lanes.put((device.pinned(CHUNK_BYTES), device.event()))
        self._threads = ThreadPoolExecutor(count, "weights") if count else None

    def send(self, target: Tensor, make: Callable[[], Array]) -> None:
        """Fill `target` with what `make` returns, an array of its shape and dtype; `make` runs in any thread."""
        if self._threads is None:
            target.upload(make())
            self._on_copied(target.nbytes)
            return
        self._pending.append(self._threads.submit(self._copy, target, make))
        self._settle(wait=False)

    def call_after(self, function: Callable[[], None]) -> None:
        """Call it in a thread that sends, once the copies of all that was sent before are submitted to the device."""
        self._pending.append(function)
        self._settle(wait=False)

    def wait_for(self, function: Callable[[], None]) -> None:
        """Return when this function of `call_after` was called."""
        while function in self._pending:
            self._settle_first()

    def finish(self) -> None:
        """Return when all is on the device. Raises: what a `make` raised, or DeviceError."""
        self._settle(wait=True)
        self.close()
        self._device.synchronize()

    def close(self) -> None:
        """Drop what has not begun."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _settle(self, *, wait: bool) -> None:
        while self._pending and (wait or not isinstance(self._pending[0], Future) or self._pending[0].done()):
            self._settle_first()

    def _settle_first(self) -> None:
        first = self._pending.popleft()
        if isinstance(first, Future):
            self._on_copied(first.result())
        else:
            first()

    def _copy(self, target: Tensor, make: Callable[[], Array]) -> int:
        memory, copied = self._lanes.get()
        try:
            copied.synchronize()  # the lane's last chunk has left it
            staged = memory.array[: target.nbytes].view(target.dtype).reshape(target.shape)
            np.copyto(staged, make())
            self._device.upload_async(target.pointer, staged)
            copied.record()
        finally:
            self._lanes.put((memory, copied))
        return target.nbytes
