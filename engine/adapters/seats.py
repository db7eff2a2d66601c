"""Which adapter is in which slot of the device, and which sequences may run for that reason."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from tessera.engine.adapters.catalog import AdapterCatalog, ServedAdapter
from tessera.engine.adapters.reader import Adapter


class Adapted(Protocol):
    """A sequence; `adapter_slot` is -1 while it has no seat."""

    adapter: ServedAdapter | None
    adapter_slot: int


class AdapterSeats:
    """Hands out `num_slots` slots to the adapters of sequences with a seat; the slot unused for longest is next.

    A sequence whose adapter finds no slot lets others pass. So that it does not wait for ever, sequences behind it may
    not begin with the adapter that has the fewest sequences running, until it has its slot.
    """

    def __init__(self, catalog: AdapterCatalog, num_slots: int) -> None:
        self.catalog = catalog
        self._slots: OrderedDict[int, ServedAdapter | None] = OrderedDict.fromkeys(range(num_slots))
        self._num_users = [0] * num_slots
        self._loads: list[tuple[int, Adapter]] = []
        self._held: bytes | None = None  # digest of the adapter that a sequence further ahead waits for the slot of

    def begin_pass(self) -> None:
        """The queue is looked through again from its front."""
        self._held = None

    def can_run(self, sequence: Adapted) -> bool:
        """Whether the sequence's adapter is in a slot or could be at once; begins to read it if it must be."""
        adapter = sequence.adapter
        if adapter is None:
            return True
        if self._slot_of(adapter) is not None:
            return adapter.digest != self._held
        if self._free_slot() is not None:
            return self.catalog.in_memory(adapter) is not None
        if self._held is None:
            slot = min(self._slots, key=lambda slot: (self._num_users[slot], slot))
            occupant = self._slots[slot]
            assert occupant is not None, "a slot without an adapter is free"
            self._held = occupant.digest
        return False

    def take(self, sequence: Adapted) -> None:
        """Give a sequence that can run its slot."""
        adapter = sequence.adapter
        if adapter is None:
            return
        slot = self._slot_of(adapter)
        if slot is None:
            slot, loaded = self._free_slot(), self.catalog.in_memory(adapter)
            assert slot is not None
            assert loaded is not None
            self._slots[slot] = adapter
            self._loads.append((slot, loaded))
        self._num_users[slot] += 1
        self._slots.move_to_end(slot)
        sequence.adapter_slot = slot

    def give_back(self, sequence: Adapted) -> None:
        slot, sequence.adapter_slot = sequence.adapter_slot, -1
        if slot >= 0:
            self._num_users[slot] -= 1
            self._slots.move_to_end(slot)

    def take_loads(self) -> list[tuple[int, Adapter]]:
        """Slots to fill before the next step."""
        loads, self._loads = self._loads, []
        return loads

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_in_slots(self) -> int:
        return sum(adapter is not None for adapter in list(self._slots.values()))

    def _slot_of(self, adapter: ServedAdapter) -> int | None:
        found = (slot for slot, other in self._slots.items() if other is not None and other.digest == adapter.digest)
        return next(found, None)

    def _free_slot(self) -> int | None:
        """The one without users that was unused for longest."""
        return next((slot for slot in self._slots if not self._num_users[slot]), None)
