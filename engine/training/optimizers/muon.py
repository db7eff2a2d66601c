"""Muon: momentum whose update of each matrix is made nearly orthogonal (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, empty, float32, zeros
from tessera.engine.training.optimizers.optimizer import MasterOptimizer
from tessera.engine.training.parameters import Parameter

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, (x x^T) x and (x x^T)^2 x
SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class MuonSettings:
    """`weight_decay` is times learning rate and weight, subtracted beside the update."""

    momentum: float = 0.95
    weight_decay: float = 0.01


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One tensor of a checkpoint, which may be part of a fused parameter; shape [R, C].

    Attributes:
        master: float32, part of the parameter's.
        mixed: float32, the gradient mixed with its momentum.
        update: in the parameter's dtype, made orthogonal in place.
        grams: in that dtype, three of [n, n], n the smaller of R and C.
        product: in that dtype, [R, C].
    """

    master: Tensor
    mixed: Tensor
    update: Tensor
    grams: tuple[Tensor, Tensor, Tensor]
    product: Tensor

    @property
    def factor(self) -> float:
        """Of the update: tall matrices take larger steps."""
        rows, columns = self.master.shape
        return float(max(1.0, rows / columns) ** 0.5)


class Muon(MasterOptimizer):
    """Of matrices alone. On a device that records graphs the iterations are one."""

    def __init__(
        self, parameters: Sequence[Parameter], ops: Ops, training: TrainingOps, settings: MuonSettings
    ) -> None:
        super().__init__(parameters, ops, training)
        self.settings = settings
        self._momenta, self._mixed = self._zeros(), self._zeros()
        self._matrices = [matrix for parameter in self.parameters for matrix in self._parts(parameter)]
        self._warm = False
        self._graph: Any = None

    def update(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        self.step += 1
        ops, training, momentum = self._ops, self._training, self.settings.momentum
        for parameter in self.parameters:
            held, mixed = self._momenta[parameter.name], self._mixed[parameter.name]
            gradient, parameter.variable.gradient = parameter.variable.gradient, None
            ops.scale(held, momentum, out=held)
            if gradient is not None:
                training.add_to(held, gradient, factor=(1 - momentum) * gradient_factor)
            ops.scale(held, momentum, out=mixed)
            if gradient is not None:
                training.add_to(mixed, gradient, factor=(1 - momentum) * gradient_factor)
        for matrix, norm in zip(self._matrices, self._norms(), strict=True):
            ops.scale(matrix.mixed, 1 / (norm + SMALLEST_NORM), out=matrix.mixed)
            ops.copy(matrix.mixed, out=matrix.update)
        self._make_orthogonal()
        for matrix in self._matrices:
            ops.scale(matrix.master, 1 - learning_rate * self.settings.weight_decay, out=matrix.master)
            training.add_to(matrix.master, matrix.update, factor=-learning_rate * matrix.factor)
        for parameter in self.parameters:
            self._round(parameter)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield from ((f"master/{name}", master), (f"momentum/{name}", self._momenta[name]))

    def _zeros(self) -> dict[str, Tensor]:
        """By name, in the shapes of the parameters."""
        return {each.name: zeros(each.variable.shape, float32, self._ops.device) for each in self.parameters}

    def _norms(self) -> list[float]:
        """Of `mixed` of each matrix; waits for the device."""
        sums = zeros((len(self._matrices),), float32, self._ops.device)
        for place, matrix in enumerate(self._matrices):
            self._training.square_sum(matrix.mixed, sums[place : place + 1])
        norms: list[float] = np.sqrt(sums.numpy().astype(np.float64)).tolist()
        return norms

    def _make_orthogonal(self) -> None:
        """The first time one after the other, so that kernels are compiled, then as a graph."""
        capture = getattr(self._ops.device, "capture", None)
        if self._graph is None and capture is not None and self._warm:
            with capture(overlaps=False) as finish:  # what is multiplied by is computed inside
                self._iterate()
            self._graph = finish()
        if self._graph is None:
            self._iterate()
            self._warm = True
        else:
            self._graph.launch()

    def _iterate(self) -> None:
        for matrix in self._matrices:
            for _ in range(NUM_ITERATIONS):
                self._newton_schulz(matrix)

    def _newton_schulz(self, matrix: _Matrix) -> None:
        """x = a x + b (x x^T) x + c (x x^T)^2 x; of tall x with x^T x on the right, which is the same."""
        ops, training, x = self._ops, self._training, matrix.update
        gram, squared, polynomial = matrix.grams
        of_x, of_gram, of_squared = COEFFICIENTS
        is_tall = x.shape[0] > x.shape[1]
        if is_tall:
            exact = gram if gram.dtype == float32 else empty(gram.shape, float32, ops.device)
            training.matmul_weight_gradient(x, x, exact, accumulate=False)
            if exact is not gram:
                ops.copy(exact, out=gram)
        else:
            ops.matmul(x, x, out=gram)
        ops.matmul(gram, gram, out=squared)  # it is symmetric
        ops.scale(gram, of_gram, out=polynomial)
        training.add_to(polynomial, squared, factor=of_squared)
        if is_tall:
            ops.matmul(x, polynomial, out=matrix.product)
        else:
            training.matmul_input_gradient(polynomial, x, out=matrix.product)
        ops.scale(x, of_x, out=x)
        training.add_to(x, matrix.product)

    def _parts(self, parameter: Parameter) -> Iterator[_Matrix]:
        start, dtype, device = 0, parameter.variable.value.dtype, self._ops.device
        columns = parameter.variable.shape[1]
        for _, rows in parameter.parts:
            part = slice(start, start + rows)
            start += rows
            master, mixed = self._masters[parameter.name][part], self._mixed[parameter.name][part]
            update, product = (empty((rows, columns), dtype, device) for _ in range(2))
            size = min(rows, columns)
            first, second, third = (empty((size, size), dtype, device) for _ in range(3))
            yield _Matrix(master, mixed, update, (first, second, third), product)
