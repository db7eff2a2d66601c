"""The share of cases whose answer a model in training would give, exactly."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from tessera.engine.builtin.training.conversation import Split
from tessera.engine.builtin.training.corpus import cases, skills_of
from tessera.engine.builtin.training.rows import tokens_of
from tessera.engine.tensor import from_numpy
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, groups, pack

SEED = 2


def last_answer(ids: list[int], counted: list[bool]) -> Example:
    """The conversation up to its last answer, the tokens of which have a weight."""
    end = max(place for place, is_answer in enumerate(counted) if is_answer) + 1
    start = max([place for place in range(end) if not counted[place]]) + 1
    weights = np.zeros(end, np.float32)
    weights[start:] = 1
    return Example(np.asarray(ids[:end], np.int32), weights)


def num_right(decoder: TrainableDecoder, examples: list[Example], max_tokens: int) -> int:
    """Examples of which every token with a weight is the most probable one after those before it.

    That is what greedy decoding would give.
    """
    right, f = 0, decoder.functions
    for group in groups(examples, max_tokens):
        batch = pack(group, 1.0, f.device)
        factors, targets = batch.factors.numpy(), batch.targets.numpy()
        places = np.flatnonzero(factors).astype(np.int32)
        logits = decoder.logits(batch.token_ids, batch.sequences, from_numpy(places, f.device))
        wrong = places[logits.numpy().argmax(axis=1) != targets[places]]
        ends = np.cumsum([example.num_tokens for example in group])
        right += len(group) - len(set(np.searchsorted(ends, wrong, side="right").tolist()))
    return right


def exact_match(
    decoder: TrainableDecoder, tokenizer: Tokenizer, split: Split, count: int, max_tokens: int
) -> dict[str, float]:
    """By skill, of at most `count` cases each; `max_tokens` are computed at a time."""
    shares = {}
    for skill in skills_of(split):
        found = cases(skill, SEED, count, split)
        examples = [last_answer(*tokens_of(tokenizer, case)) for case in found]
        shares[skill] = num_right(decoder, examples, max_tokens) / len(examples)
    return shares
