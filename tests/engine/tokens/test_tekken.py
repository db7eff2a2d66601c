"""Tokenizers from tekken.json: ids as mistral-common publishes them, merges as tiktoken makes them, hostile files."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.app.text.tokenizer import HuggingFaceTokenizer, IdTokenizer, Tokenizer, load_tokenizer
from tessera.engine.contract.errors import ModelError
from tessera.engine.grammar.compiler import load_tokenizer as load_grammar_tokenizer
from tessera.engine.tokens import tekken
from tessera.engine.tokens.folder import tokenizer_json
from tessera.engine.tokens.tekken import parse_tekken, read_tekken_chat
from tests.support.models.tiny_tekken import BYTES, tekken_values, write_tekken

SEED = 23


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def by_rank(pieces: list[bytes], word: bytes) -> list[int]:
    """tiktoken's merges (src/lib.rs): the neighbours that make the piece of the lowest rank, leftmost first."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    parts = [word] if word in ranks else [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks.get(left + right), place) for place, (left, right) in enumerate(itertools.pairwise(parts))]
        known = [(rank, place) for rank, place in pairs if rank is not None]
        if not known:
            return [ranks[part] for part in parts]
        place = min(known)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_ids_are_those_that_mistral_publishes(tmp_path: Path) -> None:
    """mistral-common, docs/usage/tokenizers.md: Mistral Small 3.1, with 1000 special tokens."""
    known = {22177: b"Hello", 2606: b" how", 1584: b" are", 1636: b" you"}
    pieces = [known.get(1000 + rank, b"\xff\xfe" + str(rank).encode()) for rank in range(256, 22177 - 1000 + 1)]
    folder = write_tekken(tmp_path, tekken_values(pieces, num_special=1000))
    tokenizer = load_tokenizer(folder)
    ids = encoded(tokenizer, "<s>[INST]Hello, how are you?[/INST]")
    assert ids == [1, 3, 22177, 1044, 2606, 1584, 1636, 1063, 4]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello, how are you?"
    assert tokenizer.token_bytes(22177) == b"Hello"
    assert tokenizer.token_string(999) == "<SPECIAL_999>"
    assert tokenizer.is_special(999)
    assert not tokenizer.is_special(1000)
    assert tokenizer.token_bytes(1000 + 0xFF) == b"\xff"


def test_calls_have_the_ids_of_mistral_commons_tests(tmp_path: Path) -> None:
    """tests/test_tokenizer_v11.py there: 100 special tokens, and no piece that the text has."""
    tokenizer = load_tokenizer(write_tekken(tmp_path, tekken_values(version="v11")))
    head = [9, 197, 195, 197, 195, 197, 33, 165, 166, 167, 32]
    arguments = [134, 198, 208, 197, 198, 208, 197, 134]
    assert encoded(tokenizer, '[TOOL_CALLS]a_a_a[CALL_ID]ABC[ARGS]"blabla"</s>') == [*head, *arguments, 2]


def test_merges_are_tiktokens(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    chooser = random.Random(SEED)
    for attempt in range(40):
        letters = b"ab \n"[: chooser.randrange(1, 5)]
        more = {bytes(chooser.choices(letters, k=chooser.randrange(2, 7))) for _ in range(chooser.randrange(30))}
        pieces = [*BYTES, *chooser.sample(sorted(more), len(more))]
        folder = write_tekken(tmp_path / str(attempt), tekken_values(pieces[256:], pattern=r"[\s\S]+"))
        tokenizer = load_tokenizer(folder)
        for _ in range(40):
            word = bytes(chooser.choices(letters, k=chooser.randrange(1, 40)))
            assert encoded(tokenizer, word.decode()) == [100 + rank for rank in by_rank(pieces, word)], (pieces, word)


def test_words_are_split_by_the_files_pattern(tmp_path: Path) -> None:
    pieces = [b"ab", b"abab", b" ab", b"12"]
    tokenizer = load_tokenizer(write_tekken(tmp_path, tekken_values(pieces)))
    assert encoded(tokenizer, "abab ab12") == [357, 358, 149, 150], "digits stand alone, whatever the pieces are"
    assert encoded(tokenizer, "\u00e9\U0001f642") == [100 + byte for byte in "\u00e9\U0001f642".encode()]
    assert tokenizer.decode(encoded(tokenizer, "\u00e9\U0001f642"), skip_special_tokens=True) == "\u00e9\U0001f642"


def test_prompts_begin_with_bos_and_grammars_read_the_same_tokens(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path, tekken_values([b"ab"]))
    tokenizer = load_tokenizer(folder)
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert tokenizer.special_tokens == named
    assert tokenizer.encode("ab", add_special_tokens=True) == [1, 356]
    described = json.loads(tokenizer_json(folder))
    assert described["model"]["vocab"]["ab"] == 356
    load_grammar_tokenizer(folder, 357, (2,))


def test_tokenizer_json_goes_before(tmp_path: Path) -> None:
    write_tekken(tmp_path, tekken_values([b"ab"]))
    load = load_tokenizer(tmp_path)
    assert isinstance(load, HuggingFaceTokenizer)
    load._inner.add_tokens(["<more>"])
    load._inner.save(str(tmp_path / "tokenizer.json"))
    assert encoded(load_tokenizer(tmp_path), "<more>") == [357]


def test_the_vocabulary_is_cut(tmp_path: Path) -> None:
    """Files have more pieces than the model has rows."""
    tokenizer = load_tokenizer(write_tekken(tmp_path, tekken_values([b"ab", b"abc", b"bc"], unused=2)))
    assert encoded(tokenizer, "abc") == [356, 199]
    assert tokenizer.token_bytes(357) == b""


def test_v3_and_v7_need_not_list_their_special_tokens(tmp_path: Path) -> None:
    for version in ("v3", "v7"):
        folder = write_tekken(tmp_path / version, tekken_values(version=version, special=None))
        assert encoded(load_tokenizer(folder), "<s>[INST]a[/INST]b</s>[TOOL_CONTENT]") == [1, 3, 197, 4, 198, 2, 19]
    refused(tekken_values(version="v11", special=None), "special_tokens must be a list of at most 100")
    refused(tekken_values(version="v3", special=None, num_special=19), "must be at least 20 where none are listed")


# -- files that are wrong -------------------------------------------------------------------------


def refused(values: Any, why: str) -> None:
    with pytest.raises(ModelError, match=f"^tekken.json: {why}|^tekken.json: .*{why}"):
        parse_tekken(values)


def config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["config"].update(changes)


def piece(place: int, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["vocab"][place].update(changes)


def special(index: int, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["special_tokens"][index].update(changes)


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda values: values.pop("config"), "config must be an object"),
    (lambda values: values.update(vocab={}), "vocab must be a list of at least 258"),
    (lambda values: values.update(vocab=values["vocab"][:257]), "vocab must be a list of at least 258"),
    (lambda values: values.update(special_tokens={}), "special_tokens must be a list of at most 100"),
    (lambda values: values.update(special_tokens=values["special_tokens"] * 9), "special_tokens must be a list"),
    (lambda values: values["vocab"].__setitem__(3, None), r"vocab\[3\] must have rank 3 and token_bytes"),
    (config(version=None), "config.version must be a text"),
    (config(version="v" * 17), "config.version must be a text"),
    (config(pattern=""), "config.pattern must be a text of 1 to 4096"),
    (config(pattern="x" * 4097), "config.pattern must be a text of 1 to 4096"),
    (config(pattern="\ud800"), "config.pattern must be a text of 1 to 4096"),
    (config(default_vocab_size=True), "config.default_vocab_size must be an integer"),
    (config(default_vocab_size=2**40), "config.default_vocab_size must be an integer"),
    (config(default_vocab_size=358.0), "config.default_vocab_size must be an integer"),
    (config(default_vocab_size=300), "config leaves 200 tokens beside special ones"),
    (config(default_num_special_tokens=-1), "config.default_num_special_tokens must be an integer"),
    (config(default_num_special_tokens=2**20), "config.default_num_special_tokens must be an integer"),
    (piece(5, rank=6), r"vocab\[5\] must have rank 5"),
    (piece(5, rank=5.0), r"vocab\[5\] must have rank 5"),
    (piece(5, token_bytes=None), r"vocab\[5\] must have rank 5 and token_bytes"),
    (piece(5, token_bytes="*"), r"vocab\[5\].token_bytes must be base64"),
    (piece(257, token_bytes=""), r"vocab\[257\].token_bytes must be base64"),
    (piece(257, token_bytes="\u00e9"), r"vocab\[257\].token_bytes must be base64"),
    (piece(257, token_bytes=base64.b64encode(b"x" * 1025).decode()), r"vocab\[257\].token_bytes must be base64"),
    (piece(5, token_bytes="BA=="), "the first 256 entries of vocab must be the single bytes"),
    (piece(257, token_bytes=base64.b64encode(b"ab").decode()), "a piece of vocab occurs twice"),
    (special(4, rank=100), r"special_tokens\[4\].rank must be an integer from 0 to 99"),
    (special(4, rank=5), r"special_tokens\[5\] has rank 5 once more"),
    (special(4, token_str=""), r"special_tokens\[4\].token_str must be a text"),
    (special(4, token_str="x" * 129), r"special_tokens\[4\].token_str must be a text"),
    (special(4, token_str="\udc00"), r"special_tokens\[4\].token_str must be a text"),
    (special(4, token_str="<s>"), "2 special tokens are '<s>'"),
    (special(4, token_str="<SPECIAL_99>"), "2 special tokens are '<SPECIAL_99>'"),
    (special(2, token_str="<end>"), "special_tokens lack </s>, the eos_token"),
    (lambda values: values["special_tokens"].__setitem__(0, 7), r"special_tokens\[0\] must be an object"),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_every_value_is_checked(change: Callable[[dict[str, Any]], Any], why: str) -> None:
    values = tekken_values([b"ab", b"cd"])
    parse_tekken(values)
    change(values)
    refused(values, why)


def test_pieces_have_bounds_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tekken, "MAX_PIECES_BYTES", 1000)
    refused(tekken_values([b"x" * 900]), "the pieces of vocab have 1156 bytes, more than 1000")
    monkeypatch.setattr(tekken, "MAX_MERGES_CHARS", 10)
    with pytest.raises(ModelError, match=r"tekken\.json: the merges of its pieces have more than 10 characters"):
        tekken.read_tekken(write_tekken(tmp_path, tekken_values([b"ab", b"abc", b"bc"])) / "tekken.json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "must hold a JSON object"),
        (b"{}", "config must be an object"),
        (json.dumps(tekken_values(pattern="(")).encode(), "its tokenizer cannot be built"),
        (json.dumps(tekken_values([b"[INST]"])).encode(), r"the special token '\[INST\]' is spelt as a piece"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n", "Git LFS"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tekken.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=why):
        tekken.read_tekken(path)
    assert isinstance(load_tokenizer(tmp_path), IdTokenizer)
    assert f"no tokenizer: {path}" in caplog.text


def test_what_a_template_needs_is_read_alone(tmp_path: Path) -> None:
    version, tokens = read_tekken_chat(write_tekken(tmp_path, tekken_values(version="v99")) / "tekken.json")
    assert version == "v99"
    assert {"[THINK]", "<s>", "<SPECIAL_99>"} <= tokens
