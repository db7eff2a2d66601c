"""Prompts of random tokens, for completions, or of random words, for chat and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.random_tokens import as_text, job_of_tokens, random_tokens
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.options.errors import OptionError


@dataclass(frozen=True)
class RandomWorkload:
    """`num_prompts` prompts of `input_len` random tokens, with completions of `output_len` tokens.

    Attributes:
        vocab_size: token ids are drawn uniformly from [16, vocab_size).
        range_ratio: lengths are drawn uniformly from (1 - ratio) to (1 + ratio) times the given ones.
        prefix_len: further tokens in front that prompts share.
        num_prefixes: different shared beginnings, which prompts take in turns.
        num_turns: of each conversation; above 1 for chat only. Each turn brings `input_len` further tokens.
        batch_size: texts in each request for embeddings.
        first: number of the first prompt; another one gives other prompts.
    """

    num_prompts: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int = 0
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    batch_size: int = 1
    first: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_turns

    def jobs(self, template: RequestTemplate) -> Iterator[Job]:
        if self.num_turns > 1 and not template.chat:
            raise OptionError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
        rng = np.random.default_rng([self.seed, self.first])
        prefixes = [self._tokens(rng, self.prefix_len, template) for _ in range(self.num_prefixes)]
        for index in range(self.num_prompts):
            prefix = prefixes[index % self.num_prefixes]
            if template.embeds:
                texts = [
                    as_text(prefix + self._tokens(rng, self._length(rng, self.input_len), template))
                    for _ in range(self.batch_size)
                ]
                yield Job(template.embeddings_body(texts))
                continue
            turns = [self._tokens(rng, self._length(rng, self.input_len), template) for _ in range(self.num_turns)]
            output_len = self._length(rng, self.output_len)
            job = job_of_tokens(template, prefix + turns[0], output_len)
            yield Job(job.body, [as_text(turn) for turn in turns[1:]])

    def part(self, first: int, num_prompts: int) -> RandomWorkload:
        return replace(self, first=first, num_prompts=num_prompts)

    def due_times(self) -> Sequence[float] | None:
        return None

    def _tokens(self, rng: np.random.Generator, length: int, template: RequestTemplate) -> list[int]:
        return random_tokens(rng, length, template, self.vocab_size)

    def _length(self, rng: np.random.Generator, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(1, int(rng.integers(length - spread, length + spread, endpoint=True))) if spread else length
