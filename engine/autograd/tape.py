"""The tape: operations in the order they ran, and their backwards in the reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from tessera.engine.autograd.variable import Variable
from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, empty, float32, from_numpy, zeros

Backward = Callable[[Tensor], None]  # takes the result's gradient, adds to those of the inputs


class _Node(NamedTuple):
    result: Variable
    backward: Backward


class Tape:
    """Records operations while `recording`; for one thread.

    A backward takes its operations off the tape and with them the values that they kept.

    Attributes:
        pace: called after each operation and each backward of one.
        one: [1] float32, the gradient of a loss by itself: what the backward of a loss need not look at.
    """

    def __init__(self, ops: Ops, training: TrainingOps) -> None:
        if ops.device is not training.device:
            raise TesseraError(f"operations on {ops.device} and training operations on {training.device}")
        self.ops = ops
        self.training = training
        self.device = ops.device
        self.recording = True
        self.pace: Callable[[], None] = lambda: None
        self.one = from_numpy(np.ones(1, np.float32), self.device)
        self._nodes: list[_Node] = []

    def record(self, value: Tensor, inputs: Sequence[Variable | None], backward: Backward) -> Variable:
        """The variable of an operation's result; `backward` is kept if an input requires a gradient."""
        needed = self.recording and any(variable is not None and variable.requires_grad for variable in inputs)
        result = Variable(value, needed, is_leaf=False)
        if needed:
            self._nodes.append(_Node(result, backward))
        self.pace()
        return result

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Operations within are not recorded."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def backward(self, result: Variable, gradient: Tensor | None = None) -> None:
        """Add the gradients of `result` to those of the leaves that it was computed from.

        Args:
            gradient: of some later function by `result`; 1 where the result is one number.

        Raises: TesseraError where `result` was not recorded, or has several elements and no gradient is given.
        """
        if not any(node.result is result for node in reversed(self._nodes)):
            raise TesseraError(
                f"{result!r} has no backward: it was computed without gradients, or its backward has run already"
            )
        if gradient is None:
            if result.value.size != 1:
                raise TesseraError(f"the gradient of {result!r} must be given: it is not a single number")
            is_loss = result.shape == self.one.shape and result.value.dtype == float32
            gradient = self.one if is_loss else from_numpy(np.ones(result.shape, result.value.dtype), self.device)
        if gradient.shape != result.shape or gradient.device is not self.device:
            raise TesseraError(f"the gradient {gradient!r} does not fit {result!r}")
        self._run_back(result, gradient)

    def checkpoint(self, function: Callable[..., Variable], *inputs: Variable) -> Variable:
        """`function(*inputs)`, whose inner values are not kept but computed again by the backward (Chen et al. 2016).

        The function must compute the same when it runs again.
        """
        if not self.recording:
            return function(*inputs)
        with self.no_grad():
            value = function(*inputs).value

        def backward(gradient: Tensor) -> None:
            inner = [Variable(variable.value, variable.requires_grad, is_leaf=False) for variable in inputs]
            outer, self._nodes = self._nodes, []
            try:
                result = function(*inner)
                if result.requires_grad:
                    self._run_back(result, gradient)
            finally:
                self._nodes = outer
            for variable, again in zip(inputs, inner, strict=True):
                if again.gradient is not None:
                    self.add_gradient(variable, again.gradient)

        result = Variable(value, True, is_leaf=False)
        self._nodes.append(_Node(result, backward))
        return result

    def add_gradient(self, variable: Variable, gradient: Tensor) -> None:
        """Add to a variable's gradient, if it requires one; `gradient` may be shared and is not written to."""
        if not variable.requires_grad:
            return
        held = variable.gradient
        if variable.is_leaf:
            if held is None:
                held = variable.gradient = empty(variable.shape, float32, self.device)
                self.ops.copy(gradient, out=held)
            else:
                self.training.add_to(held, gradient)
        elif held is None:
            variable.gradient = gradient
        elif held.dtype == gradient.dtype:
            variable.gradient = self.ops.add(held, gradient)
        else:
            variable.gradient = self.training.add_to(self._float32_copy(held), gradient)

    def weight_gradient(self, variable: Variable) -> tuple[Tensor, bool]:
        """Memory in float32 for an operation to write the gradient to, and whether it is to be added to what is there.

        For variables that require one.
        """
        held = variable.gradient
        if held is None:
            held = variable.gradient = empty(variable.shape, float32, self.device)
            return held, False
        if not variable.is_leaf:  # it may be shared
            held = variable.gradient = self._float32_copy(held)
        return held, True

    def zeroed_weight_gradient(self, variable: Variable) -> Tensor | None:
        """As `weight_gradient` for an operation that always adds; None where no gradient is required."""
        if not variable.requires_grad:
            return None
        if variable.gradient is None:
            variable.gradient = zeros(variable.shape, float32, self.device)
            return variable.gradient
        return self.weight_gradient(variable)[0]

    def _run_back(self, result: Variable, gradient: Tensor) -> None:
        result.gradient = gradient
        while self._nodes:
            node = self._nodes.pop()
            held, node.result.gradient = node.result.gradient, None
            if held is None:  # of another result
                continue
            if held.dtype != node.result.value.dtype:
                held = self.ops.copy(held, out=empty(held.shape, node.result.value.dtype, self.device))
            node.backward(held)
            self.pace()

    def _float32_copy(self, tensor: Tensor) -> Tensor:
        return self.ops.copy(tensor, out=empty(tensor.shape, float32, self.device))
