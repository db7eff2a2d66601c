"""Layers that move to page-locked host memory as soon as they are loaded, so that the device never holds them all."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tessera.engine.contract.errors import DeviceError
from tessera.engine.contract.machine import available_memory
from tessera.engine.formats import LinearWeight, WeightPart
from tessera.engine.models.offload.choice import LEAST_LAYERS, NUM_SLOTS
from tessera.engine.models.offload.copies import LayerCopies
from tessera.engine.models.offload.layer_stream import LayerStream
from tessera.engine.tensor import Buffer, Device, HostMemory, Tensor, empty, uint8

logger = logging.getLogger("tessera.engine")

ALIGNMENT = 256  # of a tensor in a slot
GIB = 2**30

Layer = TypeVar("Layer")


class HostLayers:
    """Takes layers while the weights load, then makes their `LayerStream`.

    A layer of any weight format moves by its bytes. Where no more memory can be page-locked the layers that are left
    stay on the device, and the log says so once.
    """

    def __init__(
        self,
        device: Device,
        choose: Callable[[int], Iterable[int]],
        make_copies: Callable[[Sequence[Tensor]], LayerCopies],
    ) -> None:
        """`choose`: from the bytes of the first layer to the layers that shall move."""
        self._device = device
        self._choose = choose
        self._make_copies = make_copies
        self._chosen: frozenset[int] | None = None
        self._memory: dict[int, HostMemory] = {}
        self._has_room = True

    def take(self, index: int, layer: Layer, settle: Callable[[], None]) -> Layer:
        """The layer as it is, or in host memory; called for all of them in their order.

        `settle` returns when the layer is on the device.
        """
        if self._chosen is None:
            self._chosen = frozenset(self._choose(_layout(layer)[1]))
        if index not in self._chosen or not self._has_room:
            return layer
        settle()
        places, nbytes = _layout(layer)
        try:
            memory = self._pinned(nbytes)
        except (DeviceError, MemoryError) as error:
            self._has_room = False
            logger.warning(
                "%d of %d layers are kept in host memory, the others on the device: %s",
                *(len(self._memory), len(self._chosen), error),
            )
            return layer
        address = int(memory.array.__array_interface__["data"][0])
        buffer = Buffer(self._device, address, nbytes, memory.array)
        for tensor, offset in places:
            self._device.download_async(memory.array[offset : offset + tensor.nbytes], tensor.pointer)
        self._device.synchronize()
        self._memory[index] = memory
        moved: Layer = _moved(layer, buffer, {id(tensor): offset for tensor, offset in places})
        return moved

    def streamed(self, layers: Sequence[Layer]) -> tuple[tuple[Layer, ...], LayerStream | None]:
        """All layers, those in host memory as they are in their slots, and what brings them there.

        Raises: OutOfMemoryError.
        """
        indices, found = sorted(self._memory), list(layers)
        if not indices:
            return tuple(found), None
        num_slots = min(NUM_SLOTS, len(indices))
        largest = max(memory.array.nbytes for memory in self._memory.values())
        slots = [empty((largest,), uint8, self._device) for _ in range(num_slots)]
        for number, index in enumerate(indices):
            offsets = {id(tensor): tensor.offset for tensor in _leaves(found[index])}
            found[index] = _moved(found[index], slots[number % num_slots].buffer, offsets)
        sources = [self._memory[index].array for index in indices]
        copies = self._make_copies(slots)
        if len(indices) < LEAST_LAYERS:  # each has a slot of its own, so they come back for good
            for number, source in enumerate(sources):
                copies.fetch(source, number)
                copies.hold_step(number)
            self._device.synchronize()
            return tuple(found), None
        return tuple(found), LayerStream(indices, sources, copies, slots)

    def _pinned(self, nbytes: int) -> HostMemory:
        """Raises: DeviceError, MemoryError."""
        available = available_memory()
        if available is not None and nbytes > available:
            raise MemoryError(f"only {available / GIB:.1f} GiB of host memory are available")
        return self._device.pinned(nbytes)


def _layout(layer: Any) -> tuple[list[tuple[Tensor, int]], int]:
    """Each tensor of a layer with its offset in a slot, and the bytes of all."""
    places, offset = [], 0
    for tensor in _leaves(layer):
        places.append((tensor, offset))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, offset


def _leaves(layer: Any) -> list[Tensor]:
    """The tensors of a layer, each once."""
    found: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, LinearWeight):
            for tensor in value.tensors():
                found[id(tensor)] = tensor
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                visit(getattr(value, field.name))

    visit(layer)
    return list(found.values())


def _moved(value: Any, buffer: Buffer, offsets: dict[int, int]) -> Any:
    """The same weights with their tensors in `buffer`; `offsets` by the tensors' ids."""
    if isinstance(value, Tensor):
        return Tensor(buffer, value.shape, value.dtype, offsets[id(value)])
    if isinstance(value, LinearWeight):
        parts = tuple(
            WeightPart(part.format, part.shape, {k: _moved(v, buffer, offsets) for k, v in part.tensors.items()})
            for part in value.parts
        )
        return LinearWeight(parts, _moved(value.bias, buffer, offsets), _moved(value.order, buffer, offsets))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _moved(getattr(value, name), buffer, offsets) for name in names})
    return value
