"""Optimisers over a model's parameters, with float32 masters of 16-bit ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, empty, float32, zeros
from tessera.engine.training.parameters import Parameter


class Optimizer(ABC):
    """Attributes: step: how many were taken."""

    step: int

    @abstractmethod
    def square_norm(self, total: Tensor) -> None:
        """Add the squares of all gradients to total [1] float32."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together; waits for the device."""

    @abstractmethod
    def update(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        """One step by the gradients, which are gone afterwards."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state by name, for a checkpoint."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """From a checkpoint's tensors. Raises: TesseraError naming one that is missing or does not fit."""


class MasterOptimizer(Optimizer):
    """Of parameters that each have a master, which is the parameter's own memory where that is float32."""

    def __init__(self, parameters: Sequence[Parameter], ops: Ops, training: TrainingOps) -> None:
        self.parameters = list(parameters)
        self.step = 0
        self._ops = ops
        self._training = training
        self._masters = {parameter.name: self._master(parameter) for parameter in self.parameters}

    def square_norm(self, total: Tensor) -> None:
        for parameter in self.parameters:
            if parameter.variable.gradient is not None:
                self._training.square_sum(parameter.variable.gradient, total)

    def gradient_norm(self) -> float:
        return norm_of([self], self._ops)

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for name, own in self.tensors():
            found = tensors.get(name)
            if found is None or found.shape != own.shape or found.dtype != own.dtype:
                raise TesseraError(f"the checkpoint's {name} is {found!r}, but the model makes it {own!r}")
            self._ops.copy(found, out=own)
        for parameter in self.parameters:
            self._round(parameter)
        self.step = step

    def _round(self, parameter: Parameter) -> None:
        """The parameter becomes its master in its own dtype."""
        master = self._masters[parameter.name]
        if master is not parameter.variable.value:
            self._ops.copy(master, out=parameter.variable.value)

    def _master(self, parameter: Parameter) -> Tensor:
        value = parameter.variable.value
        if value.dtype == float32:
            return value
        return self._ops.copy(value, out=empty(value.shape, float32, self._ops.device))


def norm_of(optimizers: Sequence[Optimizer], ops: Ops) -> float:
    """The Euclidean norm of all their gradients together; waits for the device."""
    total = zeros((1,), float32, ops.device)
    for optimizer in optimizers:
        optimizer.square_norm(total)
    return math.sqrt(float(total.numpy()[0]))
