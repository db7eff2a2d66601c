"""Tokenizers from a vocabulary in files of its own: vocab.json with merges.txt, or BERT's vocab.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.pre_tokenizers import GPT2, QWEN2
from tessera.engine.tokens.files import read_json, read_lines

END_OF_TEXT = "<|endoftext|>"
# Patterns of words, by what tokenizer_class and model_type begin with.
GPT2_NAMES = ("GPT2Tokenizer", "gpt2", "starcoder2", "granite")
QWEN2_NAMES = ("Qwen2Tokenizer", "qwen2", "qwen3")


def read_byte_level_bpe(folder: Path, config: dict[str, Any], model_type: str) -> tokenizers.Tokenizer:
    """From vocab.json and merges.txt, which do not say how text is split into words: its class or model_type does.

    Raises: ModelError naming the file at fault, or the class and those known.
    """
    name = str(config.get("tokenizer_class") or model_type)
    if not name.startswith(GPT2_NAMES + QWEN2_NAMES):
        raise ModelError(
            f"{folder}: vocab.json and merges.txt can be used of GPT2Tokenizer and Qwen2Tokenizer alone, "
            f"not of {name[:60]!r}"
        )
    vocab = read_json(folder / "vocab.json")
    if not vocab or not all(isinstance(token_id, int) for token_id in vocab.values()):
        raise ModelError(f"{folder / 'vocab.json'} must map tokens to ids")
    lines = [line.rstrip("\r") for line in read_lines(folder / "merges.txt")]
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    wrong = next((index for index, pair in enumerate(merges) if len(pair) != 2), None)
    if wrong is not None:
        raise ModelError(f"{folder / 'merges.txt'}: merge {wrong} must be two tokens with a space between")
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab, [(left, right) for left, right in merges]))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{folder}: vocab.json and merges.txt do not fit: {error}") from None
    pattern = QWEN2 if name.startswith(QWEN2_NAMES) else GPT2
    if pattern is QWEN2:
        inner.normalizer = normalizers.NFC()
    prefixed = config.get("add_prefix_space") is True
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def read_wordpiece(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """From vocab.txt, a token a line. Raises: ModelError."""
    tokens = [line.rstrip("\r") for line in read_lines(path)]
    vocab = {token: token_id for token_id, token in enumerate(tokens) if token}
    if "[UNK]" not in vocab:
        raise ModelError(f"{path} has no [UNK], which a WordPiece vocabulary has")
    inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    strip = config.get("strip_accents")
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case") is not False,
        strip_accents=strip if isinstance(strip, bool) else None,
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner
