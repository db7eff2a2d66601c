"""Copies of KV blocks between device and host, with a driver that copies in host memory: every byte has its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tessera.engine.cuda.copies import block_copies
from tessera.engine.cuda.copies.block_copies import CudaBlockCopies, find_stretches
from tessera.engine.tensor import CPU, Tensor, float16

NUM_BLOCKS, NUM_SLOTS = 6, 5


def make_planes(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors [NUM_BLOCKS, *shape] one after another in one buffer, of random bytes."""
    sizes = [NUM_BLOCKS * int(np.prod(shape)) * 2 for shape in shapes]
    buffer = CPU.allocate(sum(sizes))
    buffer.owner[:] = np.random.default_rng(3).integers(0, 256, buffer.nbytes)
    offsets = np.cumsum([0, *sizes])
    return [
        Tensor(buffer, (NUM_BLOCKS, *shape), float16, int(offset))
        for shape, offset in zip(shapes, offsets, strict=False)
    ]


def test_layers_of_one_shape_are_one_copy() -> None:
    planes = make_planes([(2, 4, 8)] * 6)
    (stretch,) = find_stretches(planes)
    assert (stretch.width, stretch.height, stretch.pitch) == (128, 6, NUM_BLOCKS * 128)
    assert stretch.pointer == planes[0].pointer


class HostDriver:
    """The calls that `CudaBlockCopies` makes, on host memory; `calls` has their order."""

    def __init__(self) -> None:
        self.largest_pitch = 2**31 - 1
        self.calls: list[tuple[Any, ...]] = []
        self._num_streams = 0

    def cuMemcpy2DAsync(self, copy: Any, stream: Any) -> tuple[int]:
        assert max(copy.srcPitch, copy.dstPitch) <= self.largest_pitch
        return self._copy(copy, stream, copy.Height, copy.srcPitch, copy.dstPitch)

    def cuMemcpy3DAsync(self, copy: Any, stream: Any) -> tuple[int]:
        assert max(copy.srcPitch, copy.dstPitch) <= self.largest_pitch
        assert copy.Height == 1
        return self._copy(copy, stream, copy.Depth, copy.srcPitch * copy.srcHeight, copy.dstPitch * copy.dstHeight)

    def _copy(self, copy: Any, stream: Any, count: int, source_pitch: int, destination_pitch: int) -> tuple[int]:
        self.calls.append(("copy", stream))
        to_host = copy.dstMemoryType == driver.CUmemorytype.CU_MEMORYTYPE_HOST
        source, destination = (
            (int(copy.srcDevice), int(copy.dstHost)) if to_host else (int(copy.srcHost), int(copy.dstDevice))
        )
        for row in range(count):
            CPU.copy(destination + row * destination_pitch, source + row * source_pitch, copy.WidthInBytes)
        return (0,)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[int]:
        self.calls.append(("wait", stream, event))
        return (0,)

    def cuStreamCreate(self, flags: Any) -> tuple[int, str]:
        self._num_streams += 1
        return 0, ("out", "back")[self._num_streams - 1]

    def cuCtxGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)


class HostEvent:
    """An event that is passed at once."""

    def __init__(self, device: Any) -> None:
        self.handle = object()
        self._device = device

    def record(self, stream: Any = None) -> None:
        self._device.driver.calls.append(("record", stream or self._device.stream, self.handle))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    calls = HostDriver()
    monkeypatch.setattr(block_copies, "driver", calls)
    monkeypatch.setattr(block_copies, "Event", HostEvent)
    monkeypatch.setattr(block_copies, "device_attribute", lambda device, name: calls.largest_pitch)
    return SimpleNamespace(activate=lambda: None, pinned=CPU.pinned, stream="steps", driver=calls)


@pytest.mark.parametrize("largest_pitch", [2**31 - 1, 200], ids=["2D", "3D"])
@pytest.mark.parametrize("shapes", [[(2, 4, 8)] * 4, [(2, 4, 8), (2, 4, 8), (1, 4, 8), (1, 4, 8), (2, 4, 8)]])
def test_blocks_come_back_as_they_were(device: Any, shapes: list[tuple[int, ...]], largest_pitch: int) -> None:
    device.driver.largest_pitch = largest_pitch
    planes = make_planes(shapes)
    before = [plane.numpy().copy() for plane in planes]
    copies = CudaBlockCopies(device, planes, NUM_SLOTS)
    copies.to_host([4, 1, 5], [0, 3, 2])
    expected = b"".join(each[1].tobytes() for each in before)
    assert copies.slot(3).tobytes() == expected
    for plane in planes:
        plane.numpy()[:] = 0
    copies.to_device([3, 0], [0, 4], [])
    for plane, old in zip(planes, before, strict=True):
        now = plane.numpy()
        assert now[0].tobytes() == old[1].tobytes()
        assert now[4].tobytes() == old[4].tobytes()
        assert not now[[1, 2, 3, 5]].view(np.uint8).any()


def test_copies_follow_the_steps_before_them_and_steps_wait_only_where_they_are_held(device: Any) -> None:
    copies = CudaBlockCopies(device, make_planes([(2, 4, 8)] * 2), NUM_SLOTS)
    mark = copies.to_host([1], [0])
    calls = device.driver.calls
    assert [call[:2] for call in calls] == [("record", "steps"), ("wait", "out"), ("copy", "out"), ("record", "out")]
    assert calls[0][2] is calls[1][2]
    calls.clear()
    copies.to_device([0], [2], [mark])
    assert [call[:2] for call in calls] == [
        *(("record", "steps"), ("wait", "back"), ("wait", "back"), ("copy", "back"), ("record", "back"))
    ]
    assert calls[2][2] is mark.handle
    calls.clear()
    copies.hold_steps(mark)
    assert calls == [("wait", "steps", mark.handle)]
