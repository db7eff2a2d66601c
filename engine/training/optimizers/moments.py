"""The two averages of gradients that AdamW keeps for a parameter: in float32, or in eight bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.ops.training.moment_codes import CodedMoment
from tessera.engine.tensor import Device, Tensor, float32, zeros

MIN_CODED_SIZE = 4096  # elements; the moments of smaller parameters take no memory to speak of


class Moments(ABC):
    """Both of one parameter, zero at first."""

    @abstractmethod
    def update(self, training: TrainingOps, master: Tensor, gradient: Tensor, step: AdamWStep) -> None:
        """One step of `master` and of the moments."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By name, for a checkpoint."""


class FloatMoments(Moments):
    """In float32."""

    def __init__(self, shape: tuple[int, ...], device: Device) -> None:
        self._first, self._second = (zeros(shape, float32, device) for _ in range(2))

    def update(self, training: TrainingOps, master: Tensor, gradient: Tensor, step: AdamWStep) -> None:
        training.adamw(master, gradient, self._first, self._second, step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "first", self._first
        yield "second", self._second


class CodedMoments(Moments):
    """In codes of eight bits."""

    def __init__(self, size: int, device: Device) -> None:
        self._first, self._second = (CodedMoment.zeros(size, device, signed=signed) for signed in (True, False))

    def update(self, training: TrainingOps, master: Tensor, gradient: Tensor, step: AdamWStep) -> None:
        training.adamw_8bit(master, gradient, self._first, self._second, step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, moment in (("first", self._first), ("second", self._second)):
            yield f"{name}_codes", moment.codes
            yield f"{name}_scales", moment.scales
