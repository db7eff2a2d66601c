"""What is asked of the server: prompts of random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadtest.form import Form
from loadtest.jobs import Job


class Workload(Protocol):
    """Requests in the order in which they are sent, the same for the same seed."""

    @property
    def num_prompts(self) -> int: ...

    def jobs(self, form: Form) -> Iterator[Job]: ...


@dataclass(frozen=True)
class RandomWorkload:
    """`num_prompts` completions of `input_len` random tokens each, answered by `output_len` tokens.

    Token ids are drawn uniformly from [16, vocab_size): the lowest ids are often special.
    """

    num_prompts: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int = 0

    def jobs(self, form: Form) -> Iterator[Job]:
        rng = np.random.default_rng(self.seed)
        for _ in range(self.num_prompts):
            ids = rng.integers(16, self.vocab_size, self.input_len).tolist()
            yield Job(form.completion(ids, self.output_len))
