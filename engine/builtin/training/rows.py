"""Conversations as tokens, packed end to end into rows."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from tessera.engine.builtin.training.conversation import Conversation
from tessera.engine.builtin.training.corpus import conversations
from tessera.engine.builtin.training.render import END_OF_TURN, render
from tessera.engine.training.examples import Example

END_OF_TEXT = 0
ROUGH_SHARE = 0.5  # of conversations, whose prompts are cut
CUT_SHARE = 0.2  # of the places in such prompts
_UNCUT = re.compile(r"<[^>]*>|[^a-z<]+")


def tokens_of(
    tokenizer: Tokenizer, conversation: Conversation, cuts: Random | None = None
) -> tuple[list[int], list[bool]]:
    """Ids and, for each, whether it is part of an answer.

    Args:
        cuts: prompts are cut within words, and no token spans a cut. So they are spelt in many ways and answers in one,
            as with BPE dropout (Provilkov et al. 2020): every token's spelling is learnt, and words never seen are taken
            apart as familiar ones are.
    """
    ids: list[int] = []
    counted: list[bool] = []
    for text, is_answer in render(conversation):
        if is_answer and text.removesuffix(END_OF_TURN) in conversation.spelt:
            found = _encode(tokenizer, [*text.removesuffix(END_OF_TURN), END_OF_TURN])
        elif is_answer or cuts is None:
            found = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            found = _encode(tokenizer, _cut(text, cuts))
        ids += found
        counted += [is_answer] * len(found)
    return ids, counted


def _encode(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    ids: list[int] = tokenizer.encode(pieces, is_pretokenized=True, add_special_tokens=False).ids
    return ids


def _cut(text: str, rng: Random) -> list[str]:
    """At places between two small letters, but not in markup."""
    ends = [0]
    uncut = [match.span() for match in _UNCUT.finditer(text)]
    starts = [start for start, _ in uncut]
    for place in sorted({rng.randrange(1, len(text)) for _ in range(int(len(text) * CUT_SHARE))}):
        index = bisect_right(starts, place) - 1
        if index < 0 or place > uncut[index][1]:
            ends.append(place)
    return [text[start:end] for start, end in zip(ends, [*ends[1:], len(text)], strict=True) if start < end]


@cache
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))


@dataclass(frozen=True)
class RowMaker:
    """Makes the rows of a step, which depend on the seed, the step and the tokenizer alone.

    A row is `length` tokens of conversations one after the other, and begins wherever the one before it ends.
    """

    tokenizer_file: Path
    num_rows: int
    length: int
    seed: int

    @property
    def digest(self) -> str:
        settings = f"{self.num_rows} rows of {self.length} tokens, seed {self.seed}: ".encode()
        return hashlib.sha256(settings + self.tokenizer_file.read_bytes()).hexdigest()

    def __call__(self, step: int) -> list[Example]:
        tokenizer = _tokenizer(self.tokenizer_file)
        stream = conversations((self.seed << 32) + step, "train")
        cuts = Random(f"cuts/{self.seed}/{step}")
        ids: list[int] = []
        counted: list[bool] = []
        size = self.num_rows * self.length
        while len(ids) < size:
            found, answers = tokens_of(tokenizer, next(stream), cuts if cuts.random() < ROUGH_SHARE else None)
            ids += [END_OF_TEXT, *found]
            counted += [False, *answers]
        shape = (self.num_rows, self.length)
        rows = np.asarray(ids[:size], np.int32).reshape(shape)
        weights = np.asarray(counted[:size], np.float32).reshape(shape)
        return [Example(*row) for row in zip(rows, weights, strict=True)]
