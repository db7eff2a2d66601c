"""Copies of KV blocks between the device and a pool of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tessera.engine.tensor import Mark


class BlockCopies(Protocol):
    """Moves blocks between the device's KV cache and `num_slots` slots of host memory, beside the steps.

    Copies are submitted after all steps that were submitted before, and so see what those write. Those of one direction
    are done in the order of the calls. Nothing waits for the device unless it says so.

    Attributes:
        slot_bytes: one block over all layers.
    """

    num_slots: int
    slot_bytes: int

    def to_host(self, blocks: Sequence[int], slots: Sequence[int], *, goes_on: bool = False) -> Mark:
        """-> passed once these blocks are in these slots. Raises: DeviceError, as the mark's methods do.

        `goes_on`: steps since the last call of this direction need not be done before.
        """

    def to_device(
        self, slots: Sequence[int], blocks: Sequence[int], after: Sequence[Mark], *, goes_on: bool = False
    ) -> Mark:
        """-> passed once these slots are in these blocks; begins when the marks of `after` are passed."""

    def hold_steps(self, mark: Mark) -> None:
        """Steps that are submitted from now on begin when `mark` is passed."""

    def slot(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """[slot_bytes], the memory itself."""
