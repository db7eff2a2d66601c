"""Copies of KV blocks between device and page-locked host memory, on streams of their own beside the steps.

A block lies in the KV cache in as many pieces as there are tensors, at equal distances: two for each layer, of 32 KiB
in a model with 8 KV heads of 128 in 16 bits and blocks of 16 tokens. In host memory it is one slot, so it is one 2D
copy, which the device's DMA engines do without a multiprocessor: 8,000 tokens of such a model with 32 layers are 500
calls for 1 GiB, about 2 ms of the host's time, which is why they are submitted in parts. A kernel that gathers them
would take multiprocessors from the steps that run meanwhile. Where the distance is beyond what 2D copies take, 2 GiB,
it is a 3D copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import check, device_attribute
from tessera.engine.cuda.events import Event
from tessera.engine.tensor import Tensor


class Stretch(NamedTuple):
    """Pieces of a block at equal distances.

    Attributes:
        pointer: device address of block 0's first piece.
        pitch: bytes from one piece of a block to its next.
        width: bytes of a piece.
        height: number of pieces.
        offset: of the first piece in a slot, in bytes; the others follow it closely.
    """

    pointer: int
    pitch: int
    width: int
    height: int
    offset: int


class CudaBlockCopies:
    """`BlockCopies` for the tensors of a KV cache, each [num_blocks, ...]; see `engine.kv_tiers.copies`.

    Raises: OutOfMemoryError, DeviceError if the slots cannot be page-locked.
    """

    def __init__(self, device: CudaDevice, planes: Sequence[Tensor], num_slots: int) -> None:
        device.activate()
        largest_pitch = device_attribute(check(driver.cuCtxGetDevice), "MAX_PITCH")
        self.num_slots = num_slots
        self.slot_bytes = sum(plane.nbytes // plane.shape[0] for plane in planes)
        self._device = device
        self._slots = device.pinned(num_slots * self.slot_bytes).array.reshape(num_slots, self.slot_bytes)
        self._host = int(self._slots.__array_interface__["data"][0])
        self._submitted = Event(device)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._out: Any = check(driver.cuStreamCreate, flags)
        self._back: Any = check(driver.cuStreamCreate, flags)
        stretches = find_stretches(planes)
        self._to_host = [(stretch, *_describe(stretch, largest_pitch, to_host=True)) for stretch in stretches]
        self._to_device = [(stretch, *_describe(stretch, largest_pitch, to_host=False)) for stretch in stretches]

    def to_host(self, blocks: Sequence[int], slots: Sequence[int], *, goes_on: bool = False) -> Event:
        self._follow_steps(self._out, goes_on)
        for block, slot in zip(blocks, slots, strict=True):
            for stretch, function, copy in self._to_host:
                copy.srcDevice = stretch.pointer + block * stretch.width
                copy.dstHost = self._host + slot * self.slot_bytes + stretch.offset
                check(function, copy, self._out)
        return self._mark(self._out)

    def to_device(
        self, slots: Sequence[int], blocks: Sequence[int], after: Sequence[Any], *, goes_on: bool = False
    ) -> Event:
        self._follow_steps(self._back, goes_on)
        for event in after:
            check(driver.cuStreamWaitEvent, self._back, event.handle, 0)
        for slot, block in zip(slots, blocks, strict=True):
            for stretch, function, copy in self._to_device:
                copy.srcHost = self._host + slot * self.slot_bytes + stretch.offset
                copy.dstDevice = stretch.pointer + block * stretch.width
                check(function, copy, self._back)
        return self._mark(self._back)

    def hold_steps(self, mark: Any) -> None:
        self._device.activate()
        check(driver.cuStreamWaitEvent, self._device.stream, mark.handle, 0)

    def slot(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        row: np.ndarray[Any, np.dtype[np.uint8]] = self._slots[number]
        return row

    def _follow_steps(self, stream: Any, goes_on: bool) -> None:
        """Make later work on `stream` wait for all steps submitted so far, or for those that it waits for already."""
        self._device.activate()
        if goes_on:
            return
        self._submitted.record()
        check(driver.cuStreamWaitEvent, stream, self._submitted.handle, 0)

    def _mark(self, stream: Any) -> Event:
        event = Event(self._device)
        event.record(stream)
        return event


def find_stretches(planes: Sequence[Tensor]) -> list[Stretch]:
    """The fewest stretches that have all pieces of a block, in the order of the planes."""
    found: list[Stretch] = []
    offset = 0
    for plane in planes:
        width = plane.nbytes // plane.shape[0]
        last = found[-1] if found else None
        if last is not None and last.width == width:
            distance = plane.pointer - (last.pointer + (last.height - 1) * last.pitch)
            fits = distance > 0 and distance % width == 0 and (last.height == 1 or distance == last.pitch)
            if fits:
                found[-1] = last._replace(pitch=distance, height=last.height + 1)
                offset += width
                continue
        found.append(Stretch(plane.pointer, width, width, 1, offset))
        offset += width
    return found


def _describe(stretch: Stretch, largest_pitch: int, *, to_host: bool) -> tuple[Any, Any]:
    """The driver's function for a copy, and its description without the two addresses."""
    is_flat = stretch.pitch <= largest_pitch
    copy = driver.CUDA_MEMCPY2D() if is_flat else driver.CUDA_MEMCPY3D()
    host, device = driver.CUmemorytype.CU_MEMORYTYPE_HOST, driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType, copy.dstMemoryType = (device, host) if to_host else (host, device)
    copy.WidthInBytes = stretch.width
    if is_flat:
        copy.srcPitch, copy.dstPitch = (stretch.pitch, stretch.width) if to_host else (stretch.width, stretch.pitch)
        copy.Height = stretch.height
        return driver.cuMemcpy2DAsync, copy
    # Each piece is the first row of a layer, and a layer on the device has as many rows as fill the distance.
    rows = stretch.pitch // stretch.width
    copy.srcPitch = copy.dstPitch = stretch.width
    copy.srcHeight, copy.dstHeight = (rows, 1) if to_host else (1, rows)
    copy.Height, copy.Depth = 1, stretch.height
    return driver.cuMemcpy3DAsync, copy
