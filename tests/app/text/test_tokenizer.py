"""Tokenizers: bytes of every token, special tokens, bounds before work."""

from __future__ import annotations

import itertools
import json
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tessera.app.text import pieces as pieces_module
from tessera.app.text.pieces import MIN_PIECE_CHARS
from tessera.app.text.tokenizer import (
    HuggingFaceTokenizer,
    IdTokenizer,
    check_text_length,
    load_tokenizer,
    printable_token,
)
from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError, ModelError
from tessera.engine.tokens.special import special_tokens_of
from tests.app.text.metaspace import TEXT, metaspace_tokenizer
from tests.support.servers.http_fixtures import TOKENIZER, ids, write_model_folder


def test_byte_level_tokens_are_the_texts_bytes() -> None:
    tokenizer = HuggingFaceTokenizer(TOKENIZER, {})
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == TEXT.encode()
    assert tokenizer.spelling == "byte_level"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == TEXT


def test_every_byte_has_its_token() -> None:
    tokenizer = HuggingFaceTokenizer(TOKENIZER, {})
    singles = {tokenizer.token_bytes(i) for i in range(2, 258)}
    assert singles == {bytes([byte]) for byte in range(256)}


def test_metaspace_tokens_are_the_texts_bytes() -> None:
    tokenizer = metaspace_tokenizer()
    token_ids = tokenizer.encode("hi hi ü", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == " hi hi ü".encode()
    assert tokenizer.spelling == "metaspace"
    assert tokenizer.strips_leading_space
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "hi hi ü"


def test_special_tokens_stand_for_themselves() -> None:
    tokenizer = HuggingFaceTokenizer(TOKENIZER, {})
    assert tokenizer.token_bytes(0) == b"<|im_end|>"
    assert tokenizer.is_special(0)
    assert not tokenizer.is_special(2)
    assert tokenizer.token_bytes(100_000) == b""


def test_unknown_decoder_falls_back_to_decoding() -> None:
    inner = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1}, unk_token="a"))
    inner.decoder = decoders.WordPiece()
    tokenizer = HuggingFaceTokenizer(inner, {})
    assert tokenizer.spelling == "other"
    assert tokenizer.token_bytes(0) == b"a"


def test_printable_token() -> None:
    assert printable_token("ü".encode()) == "ü"
    assert printable_token(b"\xf0\x9f") == "\\xf0\\x9f"


def test_special_tokens_of_a_config() -> None:
    config = {"bos_token": None, "eos_token": {"content": "</s>", "special": True}, "pad_token": "<pad>", "x": 1}
    assert special_tokens_of(config) == {"eos_token": "</s>", "pad_token": "<pad>"}


def test_length_is_bounded_before_encoding() -> None:
    tokenizer = HuggingFaceTokenizer(TOKENIZER, {})
    check_text_length(tokenizer, 10 * tokenizer.max_token_chars, 10, "prompt")
    with pytest.raises(ContextLengthError, match="11 tokens > 10 maximum") as caught:
        check_text_length(tokenizer, 10 * tokenizer.max_token_chars + 1, 10, "prompt")
    assert caught.value.code == "context_length_exceeded"


def test_folder_without_tokenizer_speaks_in_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, IdTokenizer)
    assert tokenizer.decode([5, 6], skip_special_tokens=True) == "5 6 "
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        tokenizer.encode("x", add_special_tokens=True)


def test_truncation_in_the_file_is_not_applied(tmp_path: Path) -> None:
    limited = Tokenizer.from_str(TOKENIZER.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=9)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abcdef", add_special_tokens=True) == ids("abcdef")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write_model_folder(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(folder)


@pytest.mark.shared
@pytest.mark.parametrize("model", ["tokenizers/qwen3", "tokenizers/phi-3", "tokenizers/minimind", "stories260K"])
def test_real_tokenizers_bytes_are_the_text(shared_models: Path, model: str) -> None:
    tokenizer = load_tokenizer(shared_models / model)
    raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(TEXT, add_special_tokens=False)))
    assert raw.decode().removeprefix(" ") == TEXT


@pytest.mark.shared
def test_legacy_false_puts_no_space_after_special_tokens(shared_models: Path) -> None:
    folder = shared_models / "tokenizers" / "phi-3"
    assert json.loads((folder / "tokenizer_config.json").read_text())["legacy"] is False
    tokenizer = load_tokenizer(folder)
    token_ids = tokenizer.encode("<|user|>\nhi<|end|>", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in token_ids] == [b"<|user|>", b"\n", b"hi", b"<|end|>"]


BOS, EOS = ("<s>", 0), ("</s>", 1)
POST_PROCESSORS: dict[str, Any] = {
    "none": None,
    "before": processors.TemplateProcessing("<s> $A", "<s> $A $B", [BOS]),
    "behind": processors.TemplateProcessing("$A </s> </s>", "$A $B", [EOS]),
    "around": processors.RobertaProcessing(EOS, BOS),
    "in a sequence": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("<s> $A </s>", "$A $B", [BOS, EOS])]
    ),
}


@pytest.mark.parametrize("form", POST_PROCESSORS)
def test_beginnings_are_those_of_the_tokenizers_library(form: str) -> None:
    vocab = {token: index for index, token in enumerate(("<s>", "</s>", "a", "b", "ab", "é", "<x>"))}
    inner = Tokenizer(models.BPE(vocab, [("a", "b")]))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if POST_PROCESSORS[form] is not None:
        inner.post_processor = POST_PROCESSORS[form]
    inner.add_special_tokens(["<s>", "</s>", "<x>"])
    tokenizer = HuggingFaceTokenizer(inner, {})
    for text in ("", "a", " ü ", "AB ab<x>é  ba", "<s>a b</s>", "ab " * 5):
        for max_tokens, add_special_tokens in itertools.product(range(8), (False, True)):
            encoding = inner.encode(text, add_special_tokens=False)
            num_special = inner.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
            encoding.truncate(max(max_tokens - num_special, 0))
            expected = inner.post_process(encoding, None, add_special_tokens).ids
            found = tokenizer.encode_beginning(text, max_tokens, add_special_tokens=add_special_tokens)
            assert found == expected, (text, max_tokens, add_special_tokens)
        offsets = inner.encode(text, add_special_tokens=False).offsets
        for max_tokens in range(1, 8):
            end = len(text) if len(offsets) <= max_tokens else offsets[max_tokens - 1][1]
            assert tokenizer.beginning(text, max_tokens) == text[:end]


def _whole_ids(tokenizer: HuggingFaceTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return tokenizer._inner.encode(text, add_special_tokens=add_special_tokens).ids


def _random_text(rng: random.Random, tokens: Sequence[str]) -> str:
    """Many tokens that texts are cut at, with what they may take along or be mistaken for."""
    between = ("", "h", "hi", " ", "  ", "\n", "e\u0301", "\u0301", "\u2581", "ab ba", "AB", "<", ">", "ﬁ", "a b")
    return "".join(rng.choice(tokens if rng.random() < 0.5 else between) for _ in range(rng.randrange(1, 16)))


PRE_TOKENIZERS: dict[str, Any] = {
    "a space before the first word": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "a space before every part": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "words": pre_tokenizers.Whitespace(),
}


@pytest.mark.parametrize("form", PRE_TOKENIZERS)
def test_tokens_of_a_texts_pieces_are_those_of_the_text(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside tokens that take spaces along or must be words, at which no text is cut, and wherever a search ends."""
    monkeypatch.setattr(pieces_module, "WINDOW_CHARS", 5)
    names = [chr(code) for code in range(33, 127)] + ["\u2581", "Ġ", "Ċ", "é", "ab", "\u2581a", "Ġa", "hi"]
    inner = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [("a", "b"), ("h", "i")]))
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = PRE_TOKENIZERS[form]
    added = [AddedToken("<x>", normalized=False), AddedToken("<x>y", normalized=False)]
    added += [AddedToken("<l>", lstrip=True, normalized=False), AddedToken("<r>", rstrip=True, normalized=False)]
    added += [AddedToken("<w>", single_word=True, normalized=False), AddedToken("<n>", normalized=True)]
    inner.add_special_tokens(added)
    tokenizer = HuggingFaceTokenizer(inner, {})
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cut = 0
    for _ in range(500):
        text = _random_text(rng, [token.content for token in added])
        pieces = tokenizer._cutter.cut(text, 1)
        assert "".join(pieces) == text
        assert all(piece.startswith("<x>") for piece in pieces[1:])
        found = tokenizer._encode_pieces(pieces, add_special_tokens=False)
        assert found == _whole_ids(tokenizer, text), (text, pieces)
        cut += len(pieces) > 1
    assert cut > 100


@pytest.mark.parametrize("form", POST_PROCESSORS)
def test_a_long_text_has_the_special_tokens_around_it_once(form: str) -> None:
    vocab = {token: index for index, token in enumerate(("<s>", "</s>", "a", "b", "ab"))}
    inner = Tokenizer(models.BPE(vocab, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if POST_PROCESSORS[form] is not None:
        inner.post_processor = POST_PROCESSORS[form]
    inner.add_special_tokens(["<s>", "</s>"])
    tokenizer = HuggingFaceTokenizer(inner, {})
    text = ("<s>" + "ab a b " * MIN_PIECE_CHARS + "</s>") * 3
    assert len(tokenizer._cutter.cut(text)) == 4
    for add_special_tokens in (False, True):
        found = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert found == _whole_ids(tokenizer, text, add_special_tokens=add_special_tokens)


@pytest.mark.shared
@pytest.mark.parametrize("model", ["tokenizers/qwen3", "tokenizers/phi-3", "tokenizers/minimind", "tokenizers/smollm3"])
def test_real_tokenizers_give_a_texts_pieces_the_texts_tokens(shared_models: Path, model: str) -> None:
    tokenizer = load_tokenizer(shared_models / model)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        text = _random_text(rng, sorted(tokenizer.added_tokens)) + TEXT[: rng.randrange(len(TEXT))]
        pieces = tokenizer._cutter.cut(text, 1)
        assert tokenizer._encode_pieces(pieces, add_special_tokens=False) == _whole_ids(tokenizer, text), (text, pieces)
