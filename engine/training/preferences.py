"""Direct preference optimisation (Rafailov et al. 2023).

For a prompt x with a preferred completion w and a rejected one l:

    loss = -log sigmoid(beta * (log p(w | x) - log p(l | x) - (log q(w | x) - log q(l | x))))

p is the model that learns, and q the reference: the same model before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.tensor import from_numpy
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, MicroBatch, groups, pack
from tessera.engine.training.optimizers.optimizer import Optimizer
from tessera.engine.training.trainer import BaseTrainer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Preference:
    """Two completions of one prompt, each with the prompt before it; their weights say which tokens are the completion.

    Attributes:
        reference: log q(w | x) - log q(l | x).
    """

    preferred: Example
    rejected: Example
    reference: float = 0.0

    @property
    def sequences(self) -> tuple[Example, ...]:
        return self.preferred, self.rejected

    @property
    def num_tokens(self) -> int:
        return self.preferred.num_tokens + self.rejected.num_tokens


def with_references(
    decoder: TrainableDecoder, preferences: Sequence[Preference], micro_batch_tokens: int
) -> list[Preference]:
    """The preferences with the reference of the decoder as it is, which must be untrained."""
    found: list[Preference] = []
    with decoder.functions.no_grad():
        for group in groups(preferences, micro_batch_tokens):
            batch = _pack(group, decoder)
            losses = decoder.token_losses(batch.token_ids, batch.targets, batch.sequences).value.numpy()
            differences = _differences(losses, batch, group)
            found += [replace(each, reference=float(ratio)) for each, ratio in zip(group, differences, strict=True)]
    return found


class PreferenceTrainer(BaseTrainer[Preference]):
    """Of preferences, whose mean loss is over the pairs.

    Args:
        beta: how far the model is held to the reference.
    """

    def __init__(
        self,
        decoder: TrainableDecoder,
        optimizer: Optimizer,
        *,
        micro_batch_tokens: int,
        max_gradient_norm: float,
        beta: float,
    ) -> None:
        super().__init__(decoder, optimizer, micro_batch_tokens=micro_batch_tokens, max_gradient_norm=max_gradient_norm)
        self._beta = beta

    def accumulate_gradients(self, items: Sequence[Preference]) -> float:
        f, loss = self.decoder.functions, 0.0
        for group in groups(items, self._micro_batch_tokens):
            batch = _pack(group, self.decoder)
            losses = self.decoder.token_losses(batch.token_ids, batch.targets, batch.sequences)
            margins = self._margins(losses.value.numpy(), batch, group)
            loss += float(_softplus(-margins).sum()) / len(items)
            # d loss / d token loss: a preferred token's loss lowers the margin by beta, a rejected one's raises it
            slopes = self._beta / (1 + np.exp(np.minimum(margins, 700))) / len(items)
            signed = np.stack([slopes, -slopes], axis=1).reshape(-1)
            lengths = [sequence.num_tokens for each in group for sequence in each.sequences]
            gradient = batch.factors.numpy() * np.repeat(signed, lengths)
            f.backward(losses, from_numpy(gradient.astype(np.float32), f.device))
        return loss

    def evaluate(self, items: Sequence[Preference]) -> float:
        loss = 0.0
        with self.decoder.functions.no_grad():
            for group in groups(items, self._micro_batch_tokens):
                batch = _pack(group, self.decoder)
                losses = self.decoder.token_losses(batch.token_ids, batch.targets, batch.sequences).value.numpy()
                loss += float(_softplus(-self._margins(losses, batch, group)).sum()) / len(items)
        return loss

    def _margins(self, losses: Array, batch: MicroBatch, group: Sequence[Preference]) -> Array:
        references = np.array([each.reference for each in group])
        margins: Array = self._beta * (_differences(losses, batch, group) - references)
        if not np.isfinite(margins).all():
            raise TesseraError("the log-probabilities of a pair are not finite; a lower learning rate may help")
        return margins


def _pack(group: Sequence[Preference], decoder: TrainableDecoder) -> MicroBatch:
    sequences = [sequence for each in group for sequence in each.sequences]
    return pack(sequences, 1.0, decoder.functions.device)


def _differences(losses: Array, batch: MicroBatch, group: Sequence[Preference]) -> Array:
    """log p(w | x) - log p(l | x) of each pair, float64."""
    weighted = losses.astype(np.float64) * batch.factors.numpy()
    lengths = [sequence.num_tokens for each in group for sequence in each.sequences]
    sums = np.add.reduceat(weighted, np.cumsum([0, *lengths[:-1]])).reshape(-1, 2)
    differences: Array = sums[:, 1] - sums[:, 0]
    return differences


def _softplus(x: Array) -> Array:
    found: Array = np.logaddexp(0.0, x)
    return found
