"""SentencePiece's BPE (Kudo & Richardson 2018) through `tokenizers`, from pieces and their scores."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

from tessera.engine.gguf.vocabulary import TokenType, Vocabulary

METASPACE = "\u2581"


def sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], unknown: str | None, *, prefixed: bool, bytewise: bool = True
) -> tokenizers.Tokenizer:
    """Without special tokens. `prefixed`: a space goes before every text.

    `bytewise`: the pieces <0x00> to <0xFF> spell what has no piece.
    """
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = _merges_by_score(vocabulary, scores)
    inner = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytewise))
    inner.normalizer = normalizers.Sequence(marked_spaces(prefixed=prefixed))
    inner.decoder = sentencepiece_decoder(prefixed=prefixed)
    return inner


def marked_spaces(*, prefixed: bool) -> list[normalizers.Normalizer]:
    """Steps that write spaces as pieces do, after one before the text."""
    prefix = [normalizers.Prepend(METASPACE)] if prefixed else []
    return [*prefix, normalizers.Replace(" ", METASPACE)]


def sentencepiece_decoder(*, prefixed: bool) -> decoders.Decoder:
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    return decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, tokens of the highest score first, then those of the lowest id.

    SentencePiece merges neighbours that together are the token of the highest score.
    """
    parts = {
        vocabulary.tokens[token_id]: token_id
        for token_id in vocabulary.of_types(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    }
    found = []
    for token, token_id in parts.items():
        score = -float(scores[token_id])
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in parts and right in parts:
                found.append((score, token_id, parts[left], parts[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
