"""Tokenizers from SentencePiece's tokenizer.model (Kudo & Richardson 2018), built through `tokenizers`.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import models, normalizers

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.files import read_bytes
from tessera.engine.gguf.sentencepiece import marked_spaces, sentencepiece_bpe, sentencepiece_decoder
from tessera.engine.gguf.vocabulary import TokenType, Vocabulary
from tessera.engine.tokens.files import MAX_BYTES
from tessera.engine.tokens.protobuf import as_bytes, as_float, as_int32, as_text, message_fields

UNIGRAM, BPE = 1, 2
MAX_PIECES = 2**22
EXTRA_SPACES = ((r"\A +| +\z", ""), (" {2,}", " "))


@dataclass
class SentencePieceModel:
    """The fields of the file that decide about tokens, with its format's defaults.

    Attributes:
        types: a `TokenType` for each piece, which numbers them as the file does.
        charsmap: a normalisation compiled by SentencePiece; empty for none.
        unknown, bos, eos: ids, negative where there is none.
    """

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    unknown: int = 0
    bos: int = 1
    eos: int = 2
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True
    escapes_spaces: bool = True

    def piece(self, token_id: int) -> str | None:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else None


class SentencePieceTokenizer(NamedTuple):
    """`special_tokens`: bos_token, eos_token and unk_token, where the file has them."""

    inner: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    special: list[tokenizers.AddedToken]


def read_sentencepiece(path: Path, listed: Mapping[int, tokenizers.AddedToken]) -> SentencePieceTokenizer:
    """Its special tokens are not added yet. `listed` by id: tokens that take the places of unused pieces.

    Raises: ModelError naming what is wrong with the file.
    """
    content = read_bytes(path, MAX_BYTES)
    try:
        model = parse_model(content)
        _rename(model, listed)
        inner = _bpe(model) if model.kind == BPE else _unigram(model)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is no SentencePiece model that can be used: {error}") from None
    ids = {"unk_token": model.unknown, "bos_token": model.bos, "eos_token": model.eos}
    named = {name: piece for name, token_id in ids.items() if (piece := model.piece(token_id)) is not None}
    special = [
        tokenizers.AddedToken(piece, special=kind != TokenType.USER_DEFINED, normalized=False)
        for piece, kind in zip(model.pieces, model.types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    return SentencePieceTokenizer(inner, named, special)


def parse_model(content: bytes) -> SentencePieceModel:
    """Raises: ValueError for what is no such file, or holds a kind of model that cannot be built."""
    model = SentencePieceModel()
    for number, value in message_fields(content):
        if number == 1:
            _parse_piece(model, as_bytes(value))
        elif number == 2:
            for key, setting in message_fields(as_bytes(value)):
                _parse_training(model, key, setting)
        elif number == 3:
            for key, setting in message_fields(as_bytes(value)):
                _parse_normalisation(model, key, setting)
    if not model.pieces:
        raise ValueError("it has no pieces")
    if len(set(model.pieces)) != len(model.pieces):
        raise ValueError("a piece occurs twice")
    if model.kind not in (UNIGRAM, BPE):
        raise ValueError("only BPE and unigram models are supported")
    if not model.escapes_spaces:
        raise ValueError("models that keep spaces as they are are not supported")
    return model


def _rename(model: SentencePieceModel, listed: Mapping[int, tokenizers.AddedToken]) -> None:
    """Give pieces the names that the folder lists for their ids, as InternLM 2 does with its unused ones."""
    known = set(model.pieces)
    for token_id, token in listed.items():
        if model.piece(token_id) is not None and token.content not in known:
            model.pieces[token_id] = token.content
            model.types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED


def _parse_piece(model: SentencePieceModel, content: bytes) -> None:
    piece, score, kind = "", 0.0, int(TokenType.NORMAL)
    for number, value in message_fields(content):
        if number == 1:
            piece = as_text(value)
        elif number == 2:
            score = as_float(value)
        elif number == 3:
            kind = as_int32(value)
    if not piece or not math.isfinite(score) or len(model.pieces) >= MAX_PIECES:
        raise ValueError(f"piece {len(model.pieces)} cannot be used")
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def _parse_training(model: SentencePieceModel, number: int, value: int | bytes) -> None:
    if number == 3:
        model.kind = as_int32(value)
    elif number == 35:
        model.byte_fallback = bool(as_int32(value))
    elif number == 40:
        model.unknown = as_int32(value)
    elif number == 41:
        model.bos = as_int32(value)
    elif number == 42:
        model.eos = as_int32(value)


def _parse_normalisation(model: SentencePieceModel, number: int, value: int | bytes) -> None:
    if number == 2:
        model.charsmap = as_bytes(value)
    elif number == 3:
        model.adds_prefix = bool(as_int32(value))
    elif number == 4:
        model.removes_spaces = bool(as_int32(value))
    elif number == 5:
        model.escapes_spaces = bool(as_int32(value))


def _bpe(model: SentencePieceModel) -> tokenizers.Tokenizer:
    vocabulary = Vocabulary(model.pieces, model.types)
    inner = sentencepiece_bpe(
        vocabulary, model.scores, model.piece(model.unknown), prefixed=model.adds_prefix, bytewise=model.byte_fallback
    )
    first = _normalisation(model)
    if first:
        inner.normalizer = normalizers.Sequence([*first, *marked_spaces(prefixed=model.adds_prefix)])
    return inner


def _unigram(model: SentencePieceModel) -> tokenizers.Tokenizer:
    pieces = list(zip(model.pieces, model.scores, strict=True))
    inner = tokenizers.Tokenizer(models.Unigram(pieces, model.unknown, model.byte_fallback))
    inner.normalizer = normalizers.Sequence([*_normalisation(model), *marked_spaces(prefixed=model.adds_prefix)])
    inner.decoder = sentencepiece_decoder(prefixed=model.adds_prefix)
    return inner


def _normalisation(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    """Before spaces are marked."""
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_spaces:
        steps += [normalizers.Replace(tokenizers.Regex(pattern), by) for pattern, by in EXTRA_SPACES]
    return steps
