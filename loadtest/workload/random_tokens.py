"""Random tokens: ids for completions, short common words for chat and embeddings."""

from __future__ import annotations

import numpy as np

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.request_template import RequestTemplate

FIRST_TOKEN_ID = 16  # lower ones are often special
# With a space before them, one token each in nearly every vocabulary.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back face level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = _COMMON.split()


def random_tokens(rng: np.random.Generator, length: int, template: RequestTemplate, vocab_size: int) -> list[int]:
    """Ids from [16, vocab_size), or indices of WORDS where the endpoint takes text."""
    low, high = (0, len(WORDS)) if template.takes_text else (FIRST_TOKEN_ID, vocab_size)
    tokens: list[int] = rng.integers(low, high, length).tolist()
    return tokens


def as_text(tokens: list[int]) -> str:
    return " ".join(WORDS[number] for number in tokens)


def job_of_tokens(template: RequestTemplate, tokens: list[int], output_len: int) -> Job:
    """One request with a prompt of `random_tokens`."""
    return Job(template.body(as_text(tokens) if template.takes_text else tokens, output_len))
