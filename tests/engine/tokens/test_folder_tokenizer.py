"""Tokenizers of model folders: what tokenizer_config.json adds, and folders without tokenizer.json."""

from __future__ import annotations

import itertools
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tessera.app.text.tokenizer import IdTokenizer, load_tokenizer
from tessera.engine.contract.errors import ModelError
from tessera.engine.grammar.compiler import load_tokenizer as load_grammar_tokenizer
from tessera.engine.tokens.folder import tokenizer_json
from tessera.engine.tokens.sentencepiece import parse_model

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
UNIGRAM, BPE = 1, 2
SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
WORDS = ["ab", "\u2581a", "abc", "\u2581abc", "bc", "cab", "\u2581\u2581"]


# -- SentencePiece ----------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def number(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def write_model(
    folder: Path, pieces: list[tuple[str, float, int]], kind: int = BPE, *, prefix: bool = True, spaces: bool = False
) -> Path:
    """tokenizer.model, as sentencepiece_model.proto has it."""
    out = b""
    for piece, score, type in pieces:
        out += block(1, block(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + number(3, type))
    out += block(2, number(3, kind) + number(35, 1) + number(40, 0) + number(41, 1) + number(42, 2) + number(43, -1))
    out += block(3, block(1, b"identity") + number(3, prefix) + number(4, spaces))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(out)
    return folder


def bpe_pieces() -> list[tuple[str, float, int]]:
    words = [(word, -float(rank), NORMAL) for rank, word in enumerate(WORDS)]
    letters = [(letter, -100.0 - rank, NORMAL) for rank, letter in enumerate("\u2581abc")]
    return [*SPECIAL, *BYTES, *words, *letters, ("<user>", 0.0, USER_DEFINED)]


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's BPE: the neighbours that make the piece of the highest score are merged, leftmost first."""
    scores = {piece: (score, index) for index, (piece, score, _) in enumerate(bpe_pieces())}
    parts = list(("\u2581" + text).replace(" ", "\u2581"))
    while True:
        pairs = [(scores[a + b][0], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [scores[part][1]] if part in scores else [scores[f"<0x{byte:02X}>"][1] for byte in part.encode()]
    return ids


def test_a_sentencepiece_model_is_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, bpe_pieces()))
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.encode("abc", add_special_tokens=True) == [1, *sentencepiece_ids("abc")]
    seed = 17
    print(f"seed {seed}")
    chooser = random.Random(seed)
    for _ in range(200):
        text = "".join(chooser.choices("abc \u00e9\U0001f642", k=chooser.randrange(1, 20)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_ids(text), text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " " + text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    (user,) = tokenizer.encode("<user>", add_special_tokens=False)[-1:]
    assert not tokenizer.is_special(user)
    assert tokenizer.is_special(1)


def test_settings_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, bpe_pieces(), prefix=False)
    added = {"content": "<|im_end|>", "special": True, "rstrip": True}
    settings = {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": {str(len(bpe_pieces())): added}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    end = len(bpe_pieces())
    assert tokenizer.encode("<|im_end|> ", add_special_tokens=True) == [end, 2]
    assert tokenizer.is_special(end)
    assert tokenizer.decode(tokenizer.encode("a b", add_special_tokens=False), skip_special_tokens=True) == "a b"
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1, "no space goes before it"


def test_listed_tokens_take_the_places_of_unused_pieces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """huggingface.co/internlm/internlm2_5-7b-chat: [UNUSED_TOKEN_146] of tokenizer.model is <|im_start|>."""
    unused = [(f"[UNUSED_TOKEN_{number}]", -200.0, NORMAL) for number in (145, 146)]
    end, start = len(bpe_pieces()), len(bpe_pieces()) + 1
    listed = {str(end): {"content": "<|im_end|>", "special": True}, str(start): {"content": "<|im_start|>"}}
    folder = write_model(tmp_path, [*bpe_pieces(), *unused])
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|im_start|>abc<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (start, end)
    assert tokenizer.decode([end, start], skip_special_tokens=True) == "<|im_start|>"
    assert not caplog.text


def test_a_unigram_model_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    pieces = [(piece, -1.0 if len(piece) > 1 else -3.0, NORMAL) for piece in ["\u2581", *"abc", "\u2581ab", "bc", "ca"]]
    folder = write_model(tmp_path, [*SPECIAL, *BYTES, *pieces], UNIGRAM, spaces=True)
    tokenizer = load_tokenizer(folder)

    def spelled(text: str) -> list[str]:
        return [tokenizer.token_string(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert spelled("abca") == ["\u2581ab", "ca"]
    assert spelled("  a  bc ") == ["\u2581", "a", "\u2581", "bc"]
    assert tokenizer.decode(tokenizer.encode("a bc", add_special_tokens=False), skip_special_tokens=True) == "a bc"


def test_fault_model_folder_a_damaged_sentencepiece_model_is_no_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seeded mutations: a tokenizer, or one of token ids and a line in the log."""
    seed = 23
    print(f"seed {seed}")
    chooser = random.Random(seed)
    whole = (write_model(tmp_path, bpe_pieces()) / "tokenizer.model").read_bytes()
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chooser.randrange(1, 4)):
            damaged[chooser.randrange(len(damaged))] = chooser.randrange(256)
        cut = chooser.choice([len(damaged), chooser.randrange(len(damaged))])
        (tmp_path / "tokenizer.model").write_bytes(damaged[:cut])
        caplog.clear()
        tokenizer = load_tokenizer(tmp_path)
        assert not isinstance(tokenizer, IdTokenizer) or "is no SentencePiece model that can be used" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no pieces"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "longer than the file"),
        (b"\xff" * 11, "does not end"),
        (b"IQ== 0\n", "longer than the file|wire type"),
        (block(1, block(1, b"a")) * 2, "a piece occurs twice"),
        (block(1, block(1, b"a")) + block(2, number(3, 3)), "only BPE and unigram"),
        (block(1, block(1, b"a") + b"\x15" + struct.pack("<f", float("nan"))), "piece 0 cannot be used"),
    ],
)
def test_what_is_no_sentencepiece_model_is_said(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model(content)


# -- other files ------------------------------------------------------------------------------------


def byte_level(vocab: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = [*LETTERS, "he", "ll", "hell", "12", "\u0120a", "<|endoftext|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("1", "2"), ("\u0120", "a")]


def write_gpt2_files(folder: Path, **config: Any) -> Path:
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(VOCAB)}))
    merges = "".join(f"{left} {right}\n" for left, right in MERGES)
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "joined"), [("GPT2Tokenizer", True), ("Qwen2TokenizerFast", False)])
def test_vocab_and_merges_are_a_tokenizer(tmp_path: Path, name: str, joined: bool) -> None:
    tokenizer = load_tokenizer(write_gpt2_files(tmp_path, tokenizer_class=name))
    expected = byte_level(VOCAB, MERGES).encode("hello a h\u00e9").ids
    assert tokenizer.encode("hello a h\u00e9", add_special_tokens=True) == expected
    assert (tokenizer.encode("12", add_special_tokens=False) == [VOCAB.index("12")]) is joined, "Qwen splits digits"
    assert tokenizer.encode("<|endoftext|>", add_special_tokens=False) == [len(VOCAB) - 1]
    assert tokenizer.is_special(len(VOCAB) - 1)


def test_model_type_says_what_the_class_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_gpt2_files(tmp_path)
    (folder / "config.json").write_text('{"model_type": "starcoder2"}')
    assert not isinstance(load_tokenizer(folder), IdTokenizer)
    (folder / "config.json").write_text('{"model_type": "stablelm"}')
    assert isinstance(load_tokenizer(folder), IdTokenizer)
    assert "GPT2Tokenizer and Qwen2Tokenizer alone, not of 'stablelm'" in caplog.text
    assert "prompts must be lists of token ids" in caplog.text


def test_a_bert_vocabulary_is_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nhello\nwor\n##ld\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello world x", add_special_tokens=True) == [2, 4, 5, 6, 1, 3]


# -- beside tokenizer.json --------------------------------------------------------------------------


def write_json(folder: Path, inner: Tokenizer, **config: Any) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_listed_tokens_that_tokenizer_json_lacks_are_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = byte_level(VOCAB, MERGES)
    inner.add_special_tokens(["<|endoftext|>"])
    size = len(VOCAB)
    listed = {
        str(size + 1): {"content": "<think>", "special": False},
        str(size): {"content": "<|im_start|>", "special": True},
        str(size - 1): {"content": "<|endoftext|>", "special": True},
        str(size + 9): {"content": "<far>", "special": True},
    }
    folder = write_json(tmp_path, inner, added_tokens_decoder=listed)
    tokenizer = load_tokenizer(folder)
    text = "<|im_start|>hell<think>"
    assert tokenizer.encode(text, add_special_tokens=False) == [size, VOCAB.index("hell"), size + 1]
    assert tokenizer.is_special(size)
    assert not tokenizer.is_special(size + 1)
    assert "the tokens '<far>' do not get the ids that the folder lists: left out" in caplog.text
    contents = {token["id"]: token["content"] for token in json.loads(tokenizer_json(folder))["added_tokens"]}
    assert contents == {size - 1: "<|endoftext|>", size: "<|im_start|>", size + 1: "<think>"}
    assert load_grammar_tokenizer(folder, size + 2, [size]) is not None


def test_a_bos_token_that_is_asked_for_is_put_before(tmp_path: Path) -> None:
    inner = byte_level(VOCAB, MERGES)
    inner.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    bos, plain = len(VOCAB) - 1, [VOCAB.index("hell")]
    folder = write_json(tmp_path, inner, add_bos_token=True, bos_token="<|endoftext|>")
    assert load_tokenizer(folder).encode("hell", add_special_tokens=True) == [bos, *plain]
    assert load_tokenizer(folder).encode("hell", add_special_tokens=False) == plain
    assert load_tokenizer(folder).encode_beginning("hellhell", 2, add_special_tokens=True) == [bos, *plain]
    special = [("<|endoftext|>", bos)]
    inner.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=special)
    assert load_tokenizer(write_json(tmp_path, inner, add_bos_token=True, bos_token="<|endoftext|>")).encode(
        "hell", add_special_tokens=True
    ) == [bos, *plain], "once"
    inner.post_processor = processors.TemplateProcessing("$A", special_tokens=special)
    folder = write_json(tmp_path, inner, add_bos_token=False, bos_token="<|endoftext|>")
    assert load_tokenizer(folder).encode("hell", add_special_tokens=True) == plain


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_git_lfs_pointer_is_named(tmp_path: Path, name: str) -> None:
    folder = write_json(tmp_path, byte_level(VOCAB, MERGES))
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n")
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`"):
        load_tokenizer(folder)
