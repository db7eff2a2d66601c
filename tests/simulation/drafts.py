"""Drafts of a history: which method makes them, how often they are right, and how late they come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.engine.contract.speculation.settings import FOLDER_METHODS, MODEL_METHODS
from tests.support.fakes.fake_drafts import MANY

PREDICTIONS = (None, None, None, None, "right", "changed", "late", "wrong")
VOCAB_SIZE = 100


@dataclass(frozen=True)
class Drafts:
    """Settings of the engine, and what its drafters are like.

    Attributes:
        settings: fields of `EngineConfig`.
        echoes: the model repeats itself, so that look-up is right now and then.
        num_right: of MANY tokens that a draft model drafts, those that the served model says.
        longest_text: that a draft model reads.
        most_indexed: tokens of texts that look-up indexes before a step.
    """

    settings: dict[str, Any]
    echoes: bool
    num_right: int
    longest_text: int
    most_indexed: int


def draw_drafts(rng: random.Random, max_model_len: int, *, always: bool) -> Drafts | None:
    """In a third of the worlds there are some, or in all."""
    if rng.random() < 0.67 and not always:
        return None
    method = rng.choice(("ngram", "suffix", *MODEL_METHODS))
    return Drafts(
        settings={
            "speculation": rng.choice(("on", "on", "auto")),
            "speculative_method": method,
            "speculative_model": "simulated" if method in FOLDER_METHODS else None,
            "prompt_lookup_min": 1,
            "num_speculative_tokens": rng.choice((None, 1, 3, 7)),
        },
        echoes=rng.random() < (0.8 if method not in MODEL_METHODS else 0.3),
        num_right=rng.choice((0, MANY // 2, MANY * 3 // 4, MANY)),
        longest_text=rng.choice((max_model_len // 2, max_model_len)),
        most_indexed=rng.choice((4, 16, 1000)),
    )


def make_prediction(rng: random.Random, answer: Sequence[int]) -> list[int] | None:
    """A text that a request predicts, of which `answer` is what comes."""
    kind = rng.choice(PREDICTIONS)
    if kind is None:
        return None
    if kind == "wrong":
        return [rng.randrange(1, VOCAB_SIZE) for _ in range(10)]
    found = list(answer)
    if kind == "late":
        return found[rng.randint(0, len(found)) :] or [1]
    if kind == "changed":
        for place in range(rng.randrange(5), len(found), 5):
            found[place : place + 1] = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(3))]
    return found or [1]
