"""A second model that computes draft tokens before a step of the first; `engine.drafters` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tessera.engine.core.step_batch import StepBatch
from tessera.engine.tensor import Buffer, Device, HostMemory, Mark, Tensor, int32

if TYPE_CHECKING:
    from tessera.engine.runner.model_runner import ModelRunner

Progress = Callable[[str, int, int], None]  # stage, done, total
IN_FLIGHT = 2  # downloads at a time


class DraftRunner(Protocol):
    """Runs on the device of the model it drafts for, which makes it ready: first `load`, then `allocate`."""

    @property
    def planned_bytes(self) -> int:
        """Of its weights and buffers, before it is loaded."""
        ...

    @property
    def block_bytes(self) -> int:
        """Of its part of a KV block."""
        ...

    @property
    def scratch(self) -> list[Buffer]:
        """As `ModelRunner.scratch`."""
        ...

    def load(self, served: ModelRunner, progress: Progress | None) -> None:
        """Weights and buffers, once those of the other model are loaded."""
        ...

    def allocate(self, served: ModelRunner) -> None:
        """Its part of the other model's KV cache."""
        ...

    def capture(self) -> None:
        """Its CUDA graphs."""
        ...

    def begin(self, steps: Sequence[StepBatch]) -> None:
        """Submit what is known of the next batch's `drafting`, before the batch is; begun steps come again."""
        ...

    def draft(self, steps: Sequence[StepBatch]) -> DraftDownload:
        """Submit the steps of `StepBatch.drafting`, but for those that have begun."""
        ...


class DraftDownload:
    """Draft tokens on their way to the host, in pinned memory."""

    def __init__(self, device: Device, drafts: Tensor) -> None:
        """`drafts` [K, num_slots] int32."""
        self._device = device
        self._drafts = drafts
        self._memory: HostMemory = device.pinned(drafts.nbytes)
        self._arrived: Mark = device.event()

    def start(self) -> None:
        """Copy all of them."""
        self._device.download_small(self._memory.array[: self._drafts.nbytes], self._drafts.pointer)
        self._arrived.record()

    def result(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """[K, num_slots], valid until the copy after the next; waits for this one."""
        self._arrived.synchronize()
        found: np.ndarray[Any, np.dtype[np.int32]] = self._memory.array[: self._drafts.nbytes].view(int32)
        return found.reshape(self._drafts.shape)
