"""One step of a training: micro-batches, accumulated gradients, clipping, the optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.engine.contract.errors import TesseraError
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, micro_batches
from tessera.engine.training.optimizer import AdamW


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


class Trainer:
    """Steps of a decoder and its optimiser.

    Args:
        micro_batch_tokens: at a time; they decide on the memory of activations.
        max_gradient_norm: longer gradients are scaled down to it.
    """

    def __init__(
        self, decoder: TrainableDecoder, optimizer: AdamW, *, micro_batch_tokens: int, max_gradient_norm: float
    ) -> None:
        self.decoder = decoder
        self.optimizer = optimizer
        self._micro_batch_tokens = micro_batch_tokens
        self._max_gradient_norm = max_gradient_norm

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Raises: TesseraError where no token has a weight, or the loss or its gradient is not finite."""
        f = self.decoder.functions
        total = _total_weight(examples)
        loss = 0.0
        for batch in micro_batches(examples, self._micro_batch_tokens, total, f.device):
            part = self.decoder.loss(*batch)
            f.backward(part)
            loss += float(part.value.numpy()[0])
        norm = self.optimizer.gradient_norm()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TesseraError(
                f"step {self.optimizer.step + 1}: the loss is {loss} and the gradient's norm {norm}; "
                "a lower learning rate may help"
            )
        self.optimizer.update(learning_rate, min(1.0, self._max_gradient_norm / (norm + 1e-6)))
        return StepResult(loss, norm, sum(example.num_tokens for example in examples))

    def evaluate(self, examples: Sequence[Example]) -> float:
        """The mean loss over the weighted tokens; changes nothing."""
        f = self.decoder.functions
        total = _total_weight(examples)
        with f.no_grad():
            batches = micro_batches(examples, self._micro_batch_tokens, total, f.device)
            return sum(float(self.decoder.loss(*batch).value.numpy()[0]) for batch in batches)


def _total_weight(examples: Sequence[Example]) -> float:
    total = sum(example.total_weight for example in examples)
    if total <= 0:
        raise TesseraError("no token of these examples has a weight, so there is nothing to learn")
    return total
