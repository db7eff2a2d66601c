"""What is asked of the server: prompts of random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """`num_prompts` completions of `input_len` random tokens each, answered by `output_len` tokens.

    Token ids are drawn uniformly from [16, vocab_size): the lowest ids are often special.
    """

    num_prompts: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int = 0

    def prompts(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(self.seed)
        for _ in range(self.num_prompts):
            yield rng.integers(16, self.vocab_size, self.input_len).tolist()
