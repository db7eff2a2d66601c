"""Texts scored by several forms of one model: log-probabilities beside the plain form's, and cases that are right.

A case is right where each token of its last answer is the likeliest after those before it, as greedy decoding has it.
All forms score the same texts, and what counts is on how many cases two of them differ: two shares of a thousand cases
are too uncertain, each by itself, to see half a point between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.engine.formats import KVFormat
from tessera.engine.models.buffers import StepBuffers
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.decoder import Decoder
from tessera.engine.models.kv_cache import KVCache
from tessera.engine.models.rope_tables import make_tables
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.interface import AttentionMetadata, Ops
from tessera.engine.tensor import CPU, Tensor, from_numpy

Array = np.ndarray[Any, Any]
STEP_TOKENS = 2048  # of texts that are computed at once
BLOCK_SIZE = 16
NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within as many standard deviations


@dataclass(frozen=True)
class Text:
    """Tokens, those that are scored, and those that must be the likeliest for the case to be right."""

    token_ids: list[int]
    scored: Array  # bool [T - 1], of the token after each
    judged: Array

    @property
    def targets(self) -> Array:
        """The scored tokens."""
        return np.array(self.token_ids[1:])[self.scored]


def in_steps(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """All in order, as many at once as `STEP_TOKENS` hold."""
    step: list[Text] = []
    size = 0
    for text in texts:
        if step and size + len(text.token_ids) > STEP_TOKENS:
            yield step
            step, size = [], 0
        step.append(text)
        size += len(text.token_ids)
    if step:
        yield step


# -- log-probabilities ------------------------------------------------------------------------------


class StepMemory:
    """A cache and activations for any step, which the forms of a model that have one dtype share."""

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any], cache: KVFormat) -> None:
        # Each text fills its last block in part: with tokens of their own, as many blocks more suffice.
        blocks = 2 * STEP_TOKENS // BLOCK_SIZE
        self.cache = KVCache(config, blocks, BLOCK_SIZE, cache, CPU)
        self.rope_tables = make_tables(config.ropes, STEP_TOKENS, CPU)
        self.buffers = StepBuffers(config, dtype, CPU, max_tokens=STEP_TOKENS, max_logits=STEP_TOKENS)


class Form:
    """A model with some weights, on the CPU."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, memory: StepMemory) -> None:
        self._decoder = Decoder(config, weights, ops, memory.cache.layers, memory.rope_tables)
        self._buffers = memory.buffers

    def log_probabilities(self, step: Sequence[Text]) -> Array:
        """Of all tokens after each scored place of texts that are computed at once, [n, V] float32."""
        lengths = np.array([len(text.token_ids) for text in step])
        places = np.flatnonzero(np.concatenate([[*text.scored, False] for text in step]))
        ids = _int32(np.concatenate([text.token_ids for text in step]))
        found = self._decoder.forward(ids, _metadata(lengths), _int32(places), self._buffers).numpy()
        result: Array = found - found.max(axis=1, keepdims=True)
        result -= np.log(np.exp(result).sum(axis=1, keepdims=True))
        return result


def _metadata(lengths: Array) -> AttentionMetadata:
    """Whole texts of `lengths` [R] tokens, each in blocks of its own."""
    num_blocks = -(-lengths // BLOCK_SIZE)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    positions = np.concatenate([np.arange(length) for length in lengths])
    return AttentionMetadata(
        positions=_int32(positions),
        slot_mapping=_int32(np.repeat(first_blocks, lengths) * BLOCK_SIZE + positions),
        block_tables=_int32(first_blocks[:, None] + np.arange(num_blocks.max())),
        table_rows=_int32(np.arange(len(lengths))),
        cu_seqlens_q=_int32([0, *np.cumsum(lengths)]),
        context_lens=_int32(lengths),
        max_seqlen_q=int(lengths.max()),
        max_context_len=int(lengths.max()),
    )


def _int32(values: Any) -> Tensor:
    return from_numpy(np.asarray(values, np.int32), CPU)


# -- what they say ----------------------------------------------------------------------------------


@dataclass
class Scores:
    """Of one form, over all texts so far.

    Attributes:
        count: of scored tokens.
        difference: sum of |difference| of their log-probabilities from the plain form's.
        divergence: sum of the KL divergences of the plain form's distributions from this one's, in nats.
        right: of each text that is a case, whether it is right.
    """

    count: int = 0
    difference: float = 0.0
    divergence: float = 0.0
    right: list[bool] = field(default_factory=list)

    def add(self, step: Sequence[Text], found: Array, plain: Array) -> None:
        """Of texts that were computed at once, see `Form.log_probabilities`."""
        targets = np.concatenate([text.targets for text in step])
        rows = np.arange(len(targets))
        self.count += len(targets)
        if found is not plain:
            self.difference += float(np.abs(found[rows, targets] - plain[rows, targets]).sum(dtype=np.float64))
            self.divergence += float((np.exp(plain) * (plain - found)).sum(dtype=np.float64))
        likeliest = np.split(found.argmax(axis=1) == targets, np.cumsum([text.scored.sum() for text in step])[:-1])
        for text, hits in zip(step, likeliest, strict=True):
            if text.judged.any():
                self.right.append(bool(hits[text.judged[text.scored]].all()))

    @property
    def mean_difference(self) -> float:
        return self.difference / self.count

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.count

    @property
    def share(self) -> float:
        """Of the cases that are right; there must be some."""
        return sum(self.right) / len(self.right)


@dataclass(frozen=True)
class Pairs:
    """The same `count` cases by two forms: how many only the first has right, and how many only the second."""

    lost: int
    gained: int
    count: int

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> Pairs:
        pairs = list(zip(first, second, strict=True))
        return cls(pairs.count((True, False)), pairs.count((False, True)), len(pairs))

    @property
    def difference(self) -> float:
        """Of the second's share from the first's."""
        return (self.gained - self.lost) / self.count

    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `difference`.

        That of Agresti and Min (2005, Statistics in Medicine 24, 729-740): Wald's for matched pairs with half a case
        more in each of the four cells, which holds with few cases that differ as well.
        """
        count, apart = self.count + 2, self.lost + self.gained + 1
        middle = (self.gained - self.lost) / count
        half = NORMAL_95 * math.sqrt(apart / count - middle**2) / math.sqrt(count)
        return middle - half, middle + half
