"""The layers in host memory on their way through the slots on the device, during each forward."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tessera.engine.models.offload.copies import Bytes, LayerCopies
from tessera.engine.tensor import Tensor


class LayerStream:
    """Brings layers to the device ahead of their use.

    Layer `indices[n]` lies in `sources[n]` and is computed in slot n modulo the number of slots. Its copy begins when
    the layer before it in that slot has been computed, and so goes on beside the layers in between.

    Attributes:
        indices: of the layers, ascending.
        nbytes: copied by a step.
        slots: on the device.
    """

    def __init__(
        self, indices: Sequence[int], sources: Sequence[Bytes], copies: LayerCopies, slots: Sequence[Tensor]
    ) -> None:
        self.indices = tuple(indices)
        self.slots = tuple(slots)
        self.nbytes = sum(source.nbytes for source in sources)
        self._sources = sources
        self._copies = copies
        self._num_slots = len(slots)

    def begin(self) -> None:
        """Submit the first copies of a forward."""
        for number in range(self._num_slots):
            self._copies.fetch(self._sources[number], number)

    def hold_step(self, number: int) -> None:
        """Have what is submitted from now on wait for the copy of layer `indices[number]`."""
        self._copies.hold_step(number % self._num_slots)

    def release(self, number: int) -> None:
        """Layer `indices[number]` has been computed: submit the copy of the next one into its slot."""
        following = number + self._num_slots
        if following < len(self._sources):
            self._copies.fetch(self._sources[following], number % self._num_slots)

    def measure_seconds(self) -> float:
        """Seconds that a step's copies take when nothing else runs, from the rate of one."""
        source, device = self._sources[0], self.slots[0].device
        seconds = 0.0
        for _ in range(2):  # the first pays for what any first copy does
            device.synchronize()
            start = time.perf_counter()
            self._copies.fetch(source, 0)
            self._copies.hold_step(0)
            device.synchronize()
            seconds = time.perf_counter() - start
        return seconds * self.nbytes / source.nbytes
