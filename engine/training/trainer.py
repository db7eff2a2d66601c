"""One step of a training: micro-batches, accumulated gradients, clipping, the optimiser."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from tessera.engine.contract.errors import TesseraError
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import AnyItem, Example, micro_batches
from tessera.engine.training.optimizers.optimizer import Optimizer


@dataclass(frozen=True)
class StepResult:
    """Attributes:
    loss: mean over the weighted tokens, before the step.
    gradient_norm: before clipping.
    num_tokens: in all sequences.
    """

    loss: float
    gradient_norm: float
    num_tokens: int


class BaseTrainer(ABC, Generic[AnyItem]):
    """Steps of a decoder and its optimiser.

    Args:
        micro_batch_tokens: at a time; they decide on the memory of activations.
        max_gradient_norm: longer gradients are scaled down to it.
    """

    def __init__(
        self, decoder: TrainableDecoder, optimizer: Optimizer, *, micro_batch_tokens: int, max_gradient_norm: float
    ) -> None:
        self.decoder = decoder
        self.optimizer = optimizer
        self._micro_batch_tokens = micro_batch_tokens
        self._max_gradient_norm = max_gradient_norm

    def step(self, items: Sequence[AnyItem], learning_rate: float) -> StepResult:
        """Raises: TesseraError where nothing can be learnt, or the loss or its gradient is not finite."""
        loss = self.accumulate_gradients(items)
        norm = self.optimizer.gradient_norm()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TesseraError(
                f"step {self.optimizer.step + 1}: the loss is {loss} and the gradient's norm {norm}; "
                "a lower learning rate may help"
            )
        self.optimizer.update(learning_rate, min(1.0, self._max_gradient_norm / (norm + 1e-6)))
        return StepResult(loss, norm, sum(item.num_tokens for item in items))

    @abstractmethod
    def accumulate_gradients(self, items: Sequence[AnyItem]) -> float:
        """Add the gradients of the mean loss to those of the parameters; -> the loss."""

    @abstractmethod
    def evaluate(self, items: Sequence[AnyItem]) -> float:
        """The mean loss; changes nothing."""


class Trainer(BaseTrainer[Example]):
    """Of cross entropy, whose mean is over the weighted tokens."""

    def accumulate_gradients(self, items: Sequence[Example]) -> float:
        """Raises: TesseraError where no token has a weight."""
        f = self.decoder.functions
        total = _total_weight(items)
        loss = 0.0
        for batch in micro_batches(items, self._micro_batch_tokens, total, f.device):
            part = self.decoder.loss(*batch)
            f.backward(part)
            loss += float(part.value.numpy()[0])
        return loss

    def evaluate(self, items: Sequence[Example]) -> float:
        f = self.decoder.functions
        total = _total_weight(items)
        with f.no_grad():
            batches = micro_batches(items, self._micro_batch_tokens, total, f.device)
            return sum(float(self.decoder.loss(*batch).value.numpy()[0]) for batch in batches)


def _total_weight(examples: Sequence[Example]) -> float:
    total = sum(example.total_weight for example in examples)
    if total <= 0:
        raise TesseraError("no token of these examples has a weight, so there is nothing to learn")
    return total
