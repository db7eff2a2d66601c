"""The tokenizer of a model folder: tokenizer.json, or one built from the files that there are instead."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.files import read_bytes
from tessera.engine.gguf.names import is_gguf
from tessera.engine.tokens.files import MAX_BYTES, read_json
from tessera.engine.tokens.special import (
    add_listed_tokens,
    frame,
    frame_as_asked,
    listed_tokens,
    prepend_only_at_start,
    special_tokens_of,
)
from tessera.engine.tokens.tekken import TEKKEN_FILE, read_tekken
from tessera.engine.tokens.vocabulary_files import END_OF_TEXT, read_byte_level_bpe, read_wordpiece

logger = logging.getLogger("tessera.engine.tokens")

TOKENIZER_FILE = "tokenizer.json"
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}


class FolderTokenizer(NamedTuple):
    """`special_tokens` are those that the folder names. `left_out`: listed tokens that could not be added."""

    inner: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    left_out: list[str]


def read_folder_tokenizer(folder: Path) -> FolderTokenizer | None:
    """None where a folder has no tokenizer, or one in files that say too little.

    Raises: ModelError naming a file that cannot be read.
    """
    config = _config_of(folder)
    named = special_tokens_of(config)
    listed = listed_tokens(folder, config)
    path = folder / TOKENIZER_FILE
    if path.is_file():
        inner = _from_json(path)
        left_out = add_listed_tokens(inner, listed)
        frame_as_asked(inner, config, named)
    else:
        built = _build(folder, config, listed)
        if built is None:
            return None
        inner, own, special = built
        left_out = add_listed_tokens(inner, listed)
        named = {**own, **named}
        inner.add_tokens(special)
        inner.add_special_tokens([token for token in named.values() if inner.token_to_id(token) is not None])
        _frame_built(inner, config, named)
    if config.get("legacy") is False:
        prepend_only_at_start(inner)
    return FolderTokenizer(inner, named, left_out)


def tokenizer_json(path: Path) -> str:
    """What tokenizer.json says, or would say, of a model folder or a GGUF file.

    Raises: ModelError also where there is no tokenizer.
    """
    if is_gguf(path):
        from tessera.engine.gguf.tokenizer import gguf_tokenizer_json  # imports NumPy, as SentencePiece does

        return gguf_tokenizer_json(path)
    if (path / TOKENIZER_FILE).is_file():
        text = read_bytes(path / TOKENIZER_FILE, MAX_BYTES).decode()
        listed = {token.content for token in listed_tokens(path, _config_of(path)).values()}
        if listed <= {token["content"] for token in json.loads(text).get("added_tokens", [])}:
            return text
    found = read_folder_tokenizer(path)
    if found is None:
        raise ModelError(f"{path} has no tokenizer")
    built: str = found.inner.to_str()
    return built


def _config_of(folder: Path) -> dict[str, Any]:
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}


def _from_json(path: Path) -> tokenizers.Tokenizer:
    content = read_bytes(path, MAX_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None


def _build(
    folder: Path, config: dict[str, Any], listed: dict[int, tokenizers.AddedToken]
) -> tuple[tokenizers.Tokenizer, dict[str, str], list[tokenizers.AddedToken]] | None:
    """A tokenizer without special tokens, those it has by itself, and tokens to add; None where it cannot be built."""
    try:
        if (folder / TEKKEN_FILE).is_file():
            return read_tekken(folder / TEKKEN_FILE)
        if (folder / "tokenizer.model").is_file():
            from tessera.engine.tokens.sentencepiece import read_sentencepiece

            return read_sentencepiece(folder / "tokenizer.model", listed)
        model_type = str(read_json(folder / "config.json").get("model_type"))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            inner = read_byte_level_bpe(folder, config, model_type)
            return inner, dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT), []
        if (folder / "vocab.txt").is_file():
            return read_wordpiece(folder / "vocab.txt", config), BERT_TOKENS, []
    except ModelError as error:
        logger.warning("no tokenizer: %s", error)
    return None


def _frame_built(inner: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """As the classes do that read these files: BERT's frame, SentencePiece's BOS, and what the folder asks for."""
    kind = type(inner.model).__name__
    if kind == "WordPiece":
        frame(inner, named["cls_token"], named["sep_token"])
        return
    adds_bos = config.get("add_bos_token", END_OF_TEXT not in named.values())
    frame(
        inner,
        named.get("bos_token") if adds_bos is True else None,
        named.get("eos_token") if config.get("add_eos_token") is True else None,
    )
