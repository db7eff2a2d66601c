"""Embedding models of a server under test: descriptions, made-up vectors, a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tessera.engine.contract.messages import EmbeddingInfo
from tests.support.models.tiny_encoder import CLS, SEP, VOCAB

Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
DIMENSION = 8
MAIN = EmbeddingInfo(
    role="main",
    architecture="FakeForCausalLM",
    pooling="last",
    dimension=DIMENSION,
    vocab_size=512,
    max_input_tokens=16,
)
BESIDE = EmbeddingInfo(
    role="beside",
    architecture="BertModel",
    pooling="mean",
    dimension=DIMENSION,
    vocab_size=len(VOCAB),
    max_input_tokens=10,
    matryoshka_dimensions=(2, 4, 8),
)


def embedded(inputs: Sequence[Sequence[int]]) -> Vectors:
    rows = np.array([[np.sin(sum(token_ids) + k) for k in range(DIMENSION)] for token_ids in inputs])
    vectors: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype("<f4")
    return np.frombuffer(vectors.tobytes(), "<f4").reshape(len(inputs), DIMENSION)  # read-only, as the real one's


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.enable_truncation(7)  # as published files have it; the server's limit is what counts
    tokenizer.enable_padding(length=7)
    return tokenizer


def cat(*words: str) -> list[int]:
    return [CLS, *(VOCAB.index(word) for word in words), SEP]
