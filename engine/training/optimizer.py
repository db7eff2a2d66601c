"""AdamW over a model's parameters, with float32 masters of 16-bit ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.tensor import Tensor, empty, float32, zeros
from tessera.engine.training.parameters import Parameter


@dataclass(frozen=True)
class AdamWSettings:
    """See `AdamWStep`; `weight_decay` is for matrices alone."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, eq=False)
class _State:
    master: Tensor  # the parameter's own memory where that is float32
    first: Tensor
    second: Tensor


class AdamW:
    """Attributes: step: how many were taken."""

    def __init__(
        self, parameters: Sequence[Parameter], ops: Ops, training: TrainingOps, settings: AdamWSettings
    ) -> None:
        self.parameters = list(parameters)
        self.settings = settings
        self.step = 0
        self._ops = ops
        self._training = training
        self._states = {parameter.name: self._state(parameter) for parameter in self.parameters}

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together; waits for the device."""
        total = zeros((1,), float32, self._ops.device)
        for parameter in self.parameters:
            if parameter.variable.gradient is not None:
                self._training.square_sum(parameter.variable.gradient, total)
        return math.sqrt(float(total.numpy()[0]))

    def update(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        """One step by the gradients, which are gone afterwards."""
        self.step += 1
        settings = self.settings
        for parameter in self.parameters:
            variable, state = parameter.variable, self._states[parameter.name]
            if variable.gradient is None:
                continue
            decay = settings.weight_decay if parameter.decays else 0.0
            numbers = (learning_rate, settings.beta1, settings.beta2, settings.eps, decay, self.step, gradient_factor)
            self._training.adamw(state.master, variable.gradient, state.first, state.second, AdamWStep(*numbers))
            if state.master is not variable.value:
                self._ops.copy(state.master, out=variable.value)
            variable.gradient = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state by name, for a checkpoint."""
        for name, state in self._states.items():
            yield from ((f"{kind}/{name}", getattr(state, kind)) for kind in ("master", "first", "second"))

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """From a checkpoint's tensors. Raises: TesseraError naming one that is missing or does not fit."""
        for name, own in self.tensors():
            found = tensors.get(name)
            if found is None or found.shape != own.shape or found.dtype != own.dtype:
                raise TesseraError(f"the checkpoint's {name} is {found!r}, but the model makes it {own!r}")
            self._ops.copy(found, out=own)
        for parameter in self.parameters:
            state = self._states[parameter.name]
            if state.master is not parameter.variable.value:
                self._ops.copy(state.master, out=parameter.variable.value)
        self.step = step

    def _state(self, parameter: Parameter) -> _State:
        value, device = parameter.variable.value, self._ops.device
        master = value
        if value.dtype != float32:
            master = self._ops.copy(value, out=empty(value.shape, float32, device))
        return _State(master, zeros(value.shape, float32, device), zeros(value.shape, float32, device))
