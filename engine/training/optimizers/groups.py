"""Several optimisers of one model, each with its own share of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor
from tessera.engine.training.optimizers.optimizer import Optimizer, norm_of


class OptimizerGroups(Optimizer):
    """Groups share no parameter.

    Args:
        groups: optimisers, and what the learning rate is times for each.
    """

    def __init__(self, groups: Sequence[tuple[Optimizer, float]], ops: Ops) -> None:
        self._groups = tuple(groups)
        self._ops = ops
        self.step = 0

    def square_norm(self, total: Tensor) -> None:
        for optimizer, _ in self._groups:
            optimizer.square_norm(total)

    def gradient_norm(self) -> float:
        return norm_of([self], self._ops)

    def update(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        self.step += 1
        for optimizer, factor in self._groups:
            optimizer.update(learning_rate * factor, gradient_factor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for optimizer, _ in self._groups:
            yield from optimizer.tensors()

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for optimizer, _ in self._groups:
            optimizer.restore(tensors, step)
        self.step = step
