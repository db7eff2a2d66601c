"""Prompts of random tokens, for completions, or of random words, for chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.options.errors import OptionError

FIRST_TOKEN_ID = 16  # lower ones are often special
# Short common words: with a space before them, one token each in nearly every vocabulary.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back face level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = _COMMON.split()


@dataclass(frozen=True)
class RandomWorkload:
    """`num_prompts` prompts of `input_len` random tokens, with completions of `output_len` tokens.

    Attributes:
        vocab_size: token ids are drawn uniformly from [16, vocab_size).
        range_ratio: lengths are drawn uniformly from (1 - ratio) to (1 + ratio) times the given ones.
        prefix_len: further tokens in front that prompts share.
        num_prefixes: different shared beginnings, which prompts take in turns.
        num_turns: of each conversation; above 1 for chat only. Each turn brings `input_len` further tokens.
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

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_turns

    def jobs(self, template: RequestTemplate) -> Iterator[Job]:
        rng = np.random.default_rng(self.seed)
        prefixes = [self._tokens(rng, self.prefix_len, template) for _ in range(self.num_prefixes)]
        for index in range(self.num_prompts):
            turns = [self._tokens(rng, self._length(rng, self.input_len), template) for _ in range(self.num_turns)]
            turns[0] = prefixes[index % self.num_prefixes] + turns[0]
            output_len = self._length(rng, self.output_len)
            if template.chat:
                first, *rest = (" ".join(WORDS[number] for number in turn) for turn in turns)
                yield Job(template.chat_body([{"role": "user", "content": first}], output_len), rest)
            elif self.num_turns > 1:
                raise OptionError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
            else:
                yield Job(template.completion_body(turns[0], output_len))

    def resized(self, num_prompts: int, seed: int) -> RandomWorkload:
        return replace(self, num_prompts=num_prompts, seed=seed)

    def _tokens(self, rng: np.random.Generator, length: int, template: RequestTemplate) -> list[int]:
        low, high = (0, len(WORDS)) if template.chat else (FIRST_TOKEN_ID, self.vocab_size)
        tokens: list[int] = rng.integers(low, high, length).tolist()
        return tokens

    def _length(self, rng: np.random.Generator, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(1, int(rng.integers(length - spread, length + spread, endpoint=True))) if spread else length
