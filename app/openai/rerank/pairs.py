"""Pairs of texts as the inputs of a model that scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tessera.app.text.tokenizer import Tokenizer
from tessera.engine.contract.messages import ScorerForm

# The prompt that Qwen3-Reranker was trained with, from its model card.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairLimits(NamedTuple):
    """Most tokens of a first text, of a second text, and of both with all that the model adds; None cuts nothing."""

    first: int | None
    second: int | None
    whole: int | None


def encode_pairs(
    tokenizer: Tokenizer,
    form: ScorerForm,
    pairs: Sequence[tuple[str, str]],
    limits: PairLimits,
    instruction: str | None = None,
) -> list[tuple[list[int], int]]:
    """Token ids of each pair, and how many are those of its first text."""
    firsts = cut_texts(tokenizer, [first for first, _ in pairs], limits.first)
    seconds = cut_texts(tokenizer, [second for _, second in pairs], limits.second)
    cut = list(zip(firsts, seconds, strict=True))
    if form == "pair":
        return tokenizer.encode_pairs(cut, limits.whole)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, AFTER))
    room = None if limits.whole is None else max(limits.whole - len(before) - len(after), 0)
    found = []
    for query, document in cut:
        question = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        if room is None:
            middle = tokenizer.encode(question, add_special_tokens=False)
        else:
            middle = tokenizer.encode_beginning(question, room, add_special_tokens=False)
        token_ids = [*before, *middle, *after]
        found.append((token_ids, len(token_ids)))
    return found


def cut_texts(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int | None) -> Sequence[str]:
    """Each text's beginning of at most `max_tokens`."""
    if not max_tokens:
        return texts
    cut = {text: tokenizer.beginning(text, max_tokens) for text in dict.fromkeys(texts)}
    return [cut[text] for text in texts]
