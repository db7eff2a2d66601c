"""Copies of layers beside a step, as a graph of what waits for what: no slot is written while it is read, or before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tessera.engine.cuda.copies import layer_copies
from tessera.engine.cuda.copies.layer_copies import CudaLayerCopies
from tessera.engine.models.offload.layer_stream import LayerStream
from tessera.engine.tensor import CPU, empty, uint8

STEPS, COPIES = "steps", "copies"
NUM_SLOTS, SIZE = 2, 64


class Node:
    """A piece of work and all that is done before it."""

    def __init__(self, name: str, before: set[Node]) -> None:
        self.name = name
        self.before: set[Node] = {*before, *(earlier for node in before for earlier in node.before)}


class OrderDriver:
    """Streams and events of the driver as a graph of nodes; copies have their addresses as names."""

    def __init__(self) -> None:
        self.ends: dict[str, set[Node]] = {STEPS: set(), COPIES: set()}
        self.events: dict[Any, set[Node]] = {}
        self.nodes: list[Node] = []

    def submit(self, stream: str, name: str) -> Node:
        node = Node(name, self.ends[stream])
        self.ends[stream] = {node}
        self.nodes.append(node)
        return node

    def record(self, event: Any, stream: str) -> None:
        self.events[event] = set(self.ends[stream])

    def cuStreamCreate(self, flags: Any) -> tuple[int, str]:
        return 0, COPIES

    def cuStreamWaitEvent(self, stream: str, event: Any, flags: int) -> tuple[int]:
        self.ends[stream] = self.ends[stream] | self.events[event]
        return (0,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: str) -> tuple[int]:
        assert nbytes == SIZE
        self.submit(stream, f"copy {source} to {target}")
        return (0,)

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)


class OrderEvent:
    def __init__(self, device: Any) -> None:
        self.handle = object()
        self._device = device

    def record(self, stream: str = STEPS) -> None:
        self._device.driver.record(self.handle, stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    order = OrderDriver()
    monkeypatch.setattr(layer_copies, "driver", order)
    monkeypatch.setattr(layer_copies, "Event", OrderEvent)
    return SimpleNamespace(
        activate=lambda: None,
        driver=order,
        wait_for_weights=lambda event: order.cuStreamWaitEvent(STEPS, event.handle, 0),
    )


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_slot_is_written_after_its_last_use_and_before_its_next(device: Any, count: int, num_steps: int) -> None:
    slots = [empty((SIZE,), uint8, CPU) for _ in range(NUM_SLOTS)]
    sources = [np.zeros(SIZE, np.uint8) for _ in range(count)]
    indices = range(0, 2 * count, 2)
    stream = LayerStream(indices, sources, CudaLayerCopies(device, slots), slots)
    order = device.driver
    uses: list[tuple[int, Node]] = []
    for _ in range(num_steps):
        order.submit(STEPS, "inputs")
        stream.begin()
        for layer in range(2 * count):
            if layer % 2 == 0:
                stream.hold_step(layer // 2)
            for _ in range(3):
                uses.append((layer, order.submit(STEPS, f"layer {layer}")))
            if layer % 2 == 0:
                stream.release(layer // 2)
        end = order.submit(STEPS, "result")
        copies = [node for node in order.nodes if node.name.startswith("copy")]
        assert end.before >= set(copies), "a capture cannot end while the copies' stream is not joined"
    assert len(copies) == num_steps * count
    for layer, use in uses:
        if layer % 2:
            continue
        number = layer // 2
        slot = slots[number % NUM_SLOTS].pointer
        source = int(sources[number].__array_interface__["data"][0])
        into_slot = [node for node in copies if node.name.endswith(f"to {slot}")]
        earlier = [node for node in into_slot if node in use.before]
        assert earlier[-1].name == f"copy {source} to {slot}", "the last copy before it is the layer's own"
        assert all(node in use.before or use in node.before for node in into_slot), "the others come after it"


def test_a_copy_goes_on_beside_the_layers_before_it(device: Any) -> None:
    slots = [empty((SIZE,), uint8, CPU) for _ in range(NUM_SLOTS)]
    sources = [np.zeros(SIZE, np.uint8) for _ in range(3)]
    stream = LayerStream((1, 3, 5), sources, CudaLayerCopies(device, slots), slots)
    stream.begin()
    first = device.driver.submit(STEPS, "layer 0")
    copies = [node for node in device.driver.nodes if node.name.startswith("copy")]
    assert len(copies) == NUM_SLOTS
    assert not first.before & set(copies), "layer 0 is on the device and waits for none"
    stream.hold_step(0)
    device.driver.submit(STEPS, "layer 1")
    stream.release(0)
    between = device.driver.submit(STEPS, "layer 2")
    third = next(node for node in device.driver.nodes if node.name.startswith("copy") and node not in copies)
    assert third not in between.before
    assert between not in third.before
