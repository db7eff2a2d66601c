"""A model that scores texts or pairs of texts: one that makes a vector of each, and a head over it."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.engine.contract.messages import TokenIds
from tessera.engine.models.specs import PoolingKind
from tessera.engine.runner.embedding_runner import EmbeddingRunner, Float32Array
from tessera.engine.runner.head import Head


class Scorer:
    """Shares the runner's memory with its embeddings, as passes come one after the other.

    Attributes:
        dimension: logits of a text.
        vocab_size, max_input_tokens, max_num_tokens, max_num_inputs: of the runner.
    """

    def __init__(self, runner: EmbeddingRunner, head: Head, pooling: PoolingKind) -> None:
        self.dimension = head.num_logits
        self.vocab_size, self.max_input_tokens = runner.vocab_size, runner.max_input_tokens
        self.max_num_tokens, self.max_num_inputs = runner.max_num_tokens, runner.max_num_inputs
        self._runner, self._head, self._pooling = runner, head, pooling

    def compute(self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None = None) -> Float32Array:
        """Logits [R, L]; the arguments as in `EmbeddingRunner.pooled`."""
        return self._head.logits(self._runner.pooled(inputs, first_lengths, self._pooling))
