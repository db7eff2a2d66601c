"""AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.tensor import Tensor
from tessera.engine.training.optimizers.moments import MIN_CODED_SIZE, CodedMoments, FloatMoments, Moments
from tessera.engine.training.optimizers.optimizer import MasterOptimizer
from tessera.engine.training.parameters import Parameter


@dataclass(frozen=True)
class AdamWSettings:
    """See `AdamWStep`; `weight_decay` is for matrices alone."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


class AdamW(MasterOptimizer):
    def __init__(
        self,
        parameters: Sequence[Parameter],
        ops: Ops,
        training: TrainingOps,
        settings: AdamWSettings,
        *,
        eight_bit: bool = False,
    ) -> None:
        """`eight_bit`: moments of matrices are kept in eight bits, but for those of embeddings and heads, whose rows
        have gradients of very different sizes (as Dettmers et al. 2022).
        """
        super().__init__(parameters, ops, training)
        self.settings = settings
        self._moments = {parameter.name: self._new_moments(parameter, eight_bit) for parameter in self.parameters}

    def update(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        self.step += 1
        settings = self.settings
        for parameter in self.parameters:
            variable, name = parameter.variable, parameter.name
            if variable.gradient is None:
                continue
            decay = settings.weight_decay if parameter.decays else 0.0
            numbers = (learning_rate, settings.beta1, settings.beta2, settings.eps, decay, self.step, gradient_factor)
            self._moments[name].update(self._training, self._masters[name], variable.gradient, AdamWStep(*numbers))
            self._round(parameter)
            variable.gradient = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield f"master/{name}", master
            for moment, tensor in self._moments[name].tensors():
                yield f"{moment}/{name}", tensor

    def _new_moments(self, parameter: Parameter, eight_bit: bool) -> Moments:
        variable, device = parameter.variable, self._ops.device
        if eight_bit and parameter.is_projection and variable.value.size >= MIN_CODED_SIZE:
            return CodedMoments(variable.value.size, device)
        return FloatMoments(variable.shape, device)
