"""Weights on their way from files to the device: several threads read, convert and copy at the same time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from tessera.engine.formats import PackedBlockFormat, WeightPart
from tessera.engine.gguf.block_parts import BlockRows
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Device, HostMemory, Mark, Tensor, empty, uint8

CHUNK_BYTES = 16 << 20  # of the device's memory, at a time and thread
MOST_THREADS = 8
STAGED_BYTES = 4 * CHUNK_BYTES  # of blocks that wait on the device to be packed
MOST_STAGED = 2


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

    def settle(self) -> None:
        """Return when all that was sent is on the device. Raises: what a `make` raised, or DeviceError."""
        self._settle(wait=True)
        self._device.synchronize()

    def finish(self) -> None:
        """As `settle`, for the last time."""
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


class BlockUpload:
    """Sends rows to parts in block formats; where the format is packed the device packs them."""

    def __init__(self, ops: Ops, stream: WeightStream) -> None:
        self._ops = ops
        self._stream = stream
        self._staged: deque[tuple[Tensor, Callable[[], None]]] = deque()  # memory, and the packing of what lies in it

    def send(self, stored: BlockRows, rows: slice, part: WeightPart, first: int) -> None:
        """These rows of a matrix to those of a part from `first` on."""
        if isinstance(part.format, PackedBlockFormat):
            self._pack(stored, rows, part, first)
        else:
            (target,) = part.tensors.values()
            self._send_blocks(stored, rows, target[first : first + rows.stop - rows.start])

    def _send_blocks(self, stored: BlockRows, rows: slice, target: Tensor) -> None:
        step = max(CHUNK_BYTES // target.shape[1], 1)
        for start in range(0, target.shape[0], step):
            end = min(start + step, target.shape[0])
            self._stream.send(target[start:end], partial(stored.blocks, slice(rows.start + start, rows.start + end)))

    def _pack(self, stored: BlockRows, rows: slice, part: WeightPart, first: int) -> None:
        """By way of memory in which the device packs them."""
        row_bytes = stored.type.row_bytes(stored.shape[-1])
        step = max(STAGED_BYTES // row_bytes, 1)
        for start in range(rows.start, rows.stop, step):
            piece = slice(start, min(start + step, rows.stop))
            memory = self._staging_memory(row_bytes)
            blocks = Tensor(memory.buffer, (piece.stop - piece.start, row_bytes), uint8, memory.offset)
            pack = partial(self._ops.pack_blocks, blocks, part, first + start - rows.start)
            self._send_blocks(stored, piece, blocks)
            self._stream.call_after(pack)
            self._staged.append((memory, pack))

    def _staging_memory(self, row_bytes: int) -> Tensor:
        """Memory for stored rows: new, or once enough is in use the piece whose packing began first."""
        if len(self._staged) < MOST_STAGED:
            return empty((max(STAGED_BYTES, row_bytes),), uint8, self._ops.device)
        memory, pack = self._staged.popleft()
        self._stream.wait_for(pack)
        return memory if memory.nbytes >= row_bytes else empty((row_bytes,), uint8, self._ops.device)
