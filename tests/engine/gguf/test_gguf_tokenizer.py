"""Tokenizers from GGUF metadata: llama.cpp's vectors, the models' own tokenizer.json, and wrong metadata."""

from __future__ import annotations

import itertools
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tessera.app.text.tokenizer import HuggingFaceTokenizer
from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.model import open_gguf
from tessera.engine.gguf.tokenizer import GGUFTokenizer, read_gguf_templates, read_gguf_tokenizer
from tessera.engine.gguf.vocabulary import stop_token_ids
from tessera.engine.grammar.compiler import load_tokenizer
from tests.engine.gguf.writer import write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
VOCABULARIES = ("bert-bge", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2")
SEPARATOR = "\n__ggml_vocab_test__\n"


def read(folder: Path, **keys: Any) -> GGUFTokenizer:
    """The tokenizer of `tokenizer.ggml.` keys, with `__` for a point."""
    metadata = {"general.architecture": keys.pop("architecture", "llama")}
    metadata |= {f"tokenizer.ggml.{key.replace('__', '.')}": value for key, value in keys.items() if value is not None}
    found = read_gguf_tokenizer(write_gguf(folder / "m.gguf", metadata))
    assert found is not None
    return found


def encode(tokenizer: GGUFTokenizer, text: str, *, special: bool = False) -> list[str]:
    """The tokens of a text by their names in the vocabulary."""
    token_ids = tokenizer.inner.encode(text, add_special_tokens=special).ids
    return [str(tokenizer.inner.id_to_token(token_id)) for token_id in token_ids]


# -- llama.cpp's vectors --------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_have_the_token_ids_of_llama_cpp(name: str, shared_models: Path, tmp_path: Path) -> None:
    path = shared_models / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(path.name + ".inp").read_text(encoding="utf-8").split(SEPARATOR)
    expected = path.with_name(path.name + ".out").read_text(encoding="utf-8").split("\n")
    if not path.exists():
        packed = path.with_name(path.name + ".xz")
        path = tmp_path / path.name
        path.write_bytes(lzma.decompress(packed.read_bytes()))
    tokenizer = read_gguf_tokenizer(path)
    assert tokenizer is not None
    assert len(texts) == len(expected) > 40
    wrong = [
        text
        for text, ids in zip(texts, expected, strict=True)
        if tokenizer.inner.encode(text, add_special_tokens=False).ids != list(map(int, ids.split()))
    ]
    assert not wrong


# -- the models' own files ------------------------------------------------------------------------

ALPHABET = (
    " \n\t\r  '.,!?()[]{}0123456789abcdefghijABCDEFéüßñçøåæœ你好世界こんにちは한국어👨👩👧🙂🚀½²₃"
    "e\u0301\u200d\u00a0\u2028\u043f\u0440\u0438\u0432\u0435\u0442"
)


def random_text(rng: random.Random, special: list[str]) -> str:
    pieces = []
    for _ in range(rng.randrange(1, 30)):
        if rng.random() < 0.1:
            pieces.append(rng.choice(special))
        pieces.append("".join(rng.choices(ALPHABET, k=rng.randrange(1, 6))))
        pieces.append(rng.choice(("I'll ", "we'VE", "don't", " the", "    ", "\n\n", "12345", "", "")))
    return "".join(pieces)


def metadata_of(file: Path, pre: str) -> dict[str, Any]:
    """What a converter makes of a tokenizer.json."""
    parsed = json.loads(file.read_text(encoding="utf-8"))
    added = {token["id"]: token for token in parsed["added_tokens"]}
    ids = {token_id: token for token, token_id in parsed["model"]["vocab"].items()}
    ids |= {token_id: token["content"] for token_id, token in added.items()}
    size = max(ids) + 1
    tokens = [ids.get(token_id, f"[PAD{token_id}]") for token_id in range(size)]
    types = np.full(size, NORMAL, np.int32)
    for token_id, token in added.items():
        types[token_id] = CONTROL if token["special"] else USER_DEFINED
    found: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if pre == "llama":
        for token_id, token in ids.items():
            if len(token) == 6 and token.startswith("<0x"):
                types[token_id] = BYTE
        scores = np.array([-1e9 if not token.strip("▁") else -token_id for token_id, token in enumerate(tokens)])
        return {**found, "model": "llama", "scores": scores.astype(np.float32), "unknown_token_id": 0}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parsed["model"]["merges"]]
    return {**found, "model": "gpt2", "pre": pre, "merges": merges}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("folder", "pre"), [("minimind", "gpt-2"), ("qwen3", "qwen2"), ("smollm3", "llama-bpe"), ("phi-3", "llama")]
)
def test_texts_have_the_token_ids_of_the_models_own_tokenizer(
    folder: str, pre: str, shared_models: Path, tmp_path: Path
) -> None:
    file = shared_models / "tokenizers" / folder / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    ours = read(tmp_path, **metadata_of(file, pre)).inner
    special = [token.content for token in theirs.get_added_tokens_decoder().values()]
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(150):
        text = random_text(rng, special)
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, f"seed {seed}: {text!r}"
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


# -- byte-level BPE -------------------------------------------------------------------------------

BPE_TOKENS = ["a", "b", "c", "Ġ", "ab", "Ġab", "1", "2", "<bos>", "<eos>", "<tool>", "[PAD11]"]
BPE_TYPES = np.array([NORMAL] * 8 + [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED], np.int32)


def bpe(folder: Path, **changed: Any) -> GGUFTokenizer:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": BPE_TOKENS,
        "token_type": BPE_TYPES,
        "merges": ["a b", "Ġ ab"],
        "bos_token_id": 8,
        "eos_token_id": 9,
    }
    return read(folder, **{**keys, **changed})


def test_byte_level_bpe(tmp_path: Path) -> None:
    tokenizer = bpe(tmp_path)
    assert encode(tokenizer, "ab ab<tool>ab<eos>c[PAD11]") == ["ab", "Ġab", "<tool>", "ab", "<eos>", "c", "1", "1"]
    wrapped = HuggingFaceTokenizer(*tokenizer)
    assert wrapped.spelling == "byte_level"
    assert wrapped.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert (wrapped.is_special(9), wrapped.is_special(10)) == (True, False)
    assert wrapped.decode([5, 10, 9], skip_special_tokens=True) == " ab<tool>"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<bos>", "ab"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<bos>", "ab", "<eos>"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["ab"]),
        ({"add_bos_token": True, "bos_token_id": 4294967295}, ["ab"]),
        ({"pre": "llama-bpe"}, ["<bos>", "ab"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["ab"]),
    ],
)
def test_texts_are_framed_as_the_file_says(tmp_path: Path, changed: dict[str, Any], expected: list[str]) -> None:
    assert encode(bpe(tmp_path, **changed), "ab", special=True) == expected
    assert encode(bpe(tmp_path, **changed), "ab") == ["ab"]


def test_merges_of_tokens_that_are_missing_are_left_out(tmp_path: Path) -> None:
    assert encode(bpe(tmp_path, merges=["b c", "a b", "x y"]), "abc") == ["ab", "c"]
    grammars = load_tokenizer(tmp_path / "m.gguf", len(BPE_TOKENS), [9])
    assert grammars.inner.tokenize_str("ab")


@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", ["12", "1"]), ("smollm", ["1", "2", "1"])])
def test_the_named_pre_tokenizer_splits(tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokens = [*BPE_TOKENS, "12"]
    types = np.append(BPE_TYPES, np.int32(NORMAL))
    assert encode(bpe(tmp_path, pre=pre, tokens=tokens, token_type=types, merges=["1 2"]), "121") == expected


@pytest.mark.parametrize(
    ("architecture", "bos", "pre"),
    [
        ("phi2", "<bos>", "phi-2"),  # as issue 41 of wllama shows it
        ("qwen2", "<bos>", "qwen2"),
        ("llama", "<|begin_of_text|>", "llama-bpe"),  # Llama 3's, as issue 13 of tc-mb/llama.cpp shows it
        ("llama", "<bos>", "default"),
    ],
)
def test_files_that_name_no_pre_tokenizer_have_that_of_their_model(
    tmp_path: Path, architecture: str, bos: str, pre: str
) -> None:
    tokens = [bos if token == "<bos>" else token for token in BPE_TOKENS]
    unnamed = bpe(tmp_path, architecture=architecture, tokens=tokens, pre=None).inner.to_str()
    assert unnamed == bpe(tmp_path, architecture=architecture, tokens=tokens, pre=pre).inner.to_str()
    others = {bpe(tmp_path, tokens=tokens, pre=name).inner.to_str() for name in {"default", "llama-bpe"} - {pre}}
    assert unnamed not in others


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # llama.cpp, llama-vocab.cpp, of which the first is Tiny Aya's (Cohere2) and the second MiniCPM 5's (Llama).
        ("tiny_aya", ["1", "234", "567", " Don't", " a", "!\n\n"]),
        ("minicpm5", ["123", "456", "7", " Don", "'t", " a", "!\n\n"]),
    ],
)
def test_digits_are_grouped_from_either_end(tmp_path: Path, pre: str, expected: list[str]) -> None:
    text = "1234567 Don't a!\n\n"
    pieces = bpe(tmp_path, pre=pre).inner.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in pieces] == expected


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", "deepseek-v3", "tekken", "gpt-4o", "bloom"])
def test_every_pattern_keeps_the_whole_text(tmp_path: Path, pre: str) -> None:
    inner = bpe(tmp_path, pre=pre).inner
    text = "Hello, wörld's 1234567 你好\uff01 \n\n  (x)=y; DON'T stop... ÀÉ\tend "
    pieces = inner.pre_tokenizer.pre_tokenize_str(text)
    spans = [span for _, span in pieces]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert len(spans) > 5


# -- SentencePiece --------------------------------------------------------------------------------

SPM_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "h",
    "i",
    "hi",
    "▁h",
    "▁hi",
    "<u>",
]
SPM_TYPES = np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6, USER_DEFINED], np.int32)


def spm(folder: Path, **changed: Any) -> GGUFTokenizer:
    scores = np.zeros(len(SPM_TOKENS), np.float32)
    scores[-7:-1] = [-9, -9, -9, -1, -2, -3]
    keys = {
        "model": "llama",
        "tokens": SPM_TOKENS,
        "token_type": SPM_TYPES,
        "scores": scores,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return read(folder, **{**keys, **changed})


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path)
    assert encode(tokenizer, "hi hé", special=True) == ["<s>", "▁hi", "▁h", "<0xC3>", "<0xA9>"]
    assert encode(tokenizer, "<u>hi</s>") == ["<u>", "▁hi", "</s>"]
    wrapped = HuggingFaceTokenizer(*tokenizer)
    assert wrapped.spelling == "metaspace"
    assert wrapped.strips_leading_space
    text = "hi hi"
    assert wrapped.decode(wrapped.encode(text, add_special_tokens=True), skip_special_tokens=True) == text


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert encode(tokenizer, "hi hi", special=True) == ["hi", "▁hi"]
    assert not HuggingFaceTokenizer(*tokenizer).strips_leading_space


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_phi3s_markers_take_the_white_space_after_them(tmp_path: Path, architecture: str) -> None:
    tokens = [*SPM_TOKENS[:-1], "<|user|>"]
    types = np.append(SPM_TYPES[:-1], np.int32(CONTROL))
    tokenizer = spm(tmp_path, architecture=architecture, tokens=tokens, token_type=types)
    found = encode(tokenizer, "<|user|>\nhi<s> hi")
    assert (
        found
        == {
            "phi3": ["<|user|>", "▁hi", "<s>", "▁", "▁hi"],
            "llama": ["<|user|>", "▁", "<0x0A>", "hi", "<s>", "▁", "▁hi"],
        }[architecture]
    )


@pytest.mark.parametrize("architecture", ["gemma", "gemma2"])
def test_gemmas_first_files_have_marks_of_turns_and_no_space_before_texts(tmp_path: Path, architecture: str) -> None:
    # Facts: llama.cpp's issue 8584 shows gemma-1.1-2b-it; its pull requests 8244 and 8248 mended the converter.
    tokens, types = [*SPM_TOKENS], SPM_TYPES.copy()
    tokens[106:108], types[106:108] = ["<start_of_turn>", "<end_of_turn>"], NORMAL
    changed = {"architecture": architecture, "tokens": tokens, "token_type": types}
    tokenizer = spm(tmp_path, **changed)
    found = encode(tokenizer, "hi<start_of_turn>hi<end_of_turn> hi")
    assert found == ["hi", "<start_of_turn>", "hi", "<end_of_turn>", "▁hi"]
    assert HuggingFaceTokenizer(*tokenizer).is_special(107)
    assert stop_token_ids(open_gguf(tmp_path / "m.gguf").metadata) == (2, 107)
    assert encode(spm(tmp_path, **{**changed, "architecture": "llama"}), "hi<start_of_turn>")[0] == "▁hi"


def test_the_token_of_the_highest_score_is_merged_first(tmp_path: Path) -> None:
    scores = np.zeros(len(SPM_TOKENS), np.float32)
    scores[-7:-1] = [-9, -9, -9, -2, -1, -9]
    tokenizer = spm(tmp_path, scores=scores, tokens=[*SPM_TOKENS[:-2], "▁hh", "<u>"])
    assert encode(tokenizer, "hi") == ["▁h", "i"]
    assert encode(spm(tmp_path, tokens=[*SPM_TOKENS[:-2], "▁hh", "<u>"]), "hi") == ["▁", "hi"]


# -- WordPiece ------------------------------------------------------------------------------------


def wordpiece(folder: Path, **changed: Any) -> GGUFTokenizer:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁play", "ing", "▁,", "▁résumé", "▁resume"]
    keys = {
        "model": "bert",
        "tokens": tokens,
        "token_type": np.array([CONTROL] * 4 + [NORMAL] * 5, np.int32),
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
    }
    return read(folder, architecture="bert", **{**keys, **changed})


def test_wordpiece(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path)
    expected = ["[CLS]", "play", "##ing", ",", "resume", "[UNK]", "[SEP]"]
    assert encode(tokenizer, "Playing, Résumé xyz", special=True) == expected
    assert tokenizer.special_tokens["cls_token"] == "[CLS]"
    assert tokenizer.inner.decode([4, 5, 6]) == "playing,"


def test_wordpiece_that_keeps_case_and_accents(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path, normalizer__lowercase=False)
    assert encode(tokenizer, "résumé Play") == ["résumé", "[UNK]"]


# -- templates ------------------------------------------------------------------------------------


def test_templates_come_from_the_metadata(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            "tokenizer.chat_template": "{{ messages }}",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "{{ tools }}",
        },
    )
    assert read_gguf_templates(path) == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert read_gguf_templates(write_gguf(path, {})) == {}


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_may_have_no_tokenizer(tmp_path: Path, model: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", {} if model is None else {"tokenizer.ggml.model": model})
    assert read_gguf_tokenizer(path) is None


@pytest.mark.parametrize(
    ("make", "changed", "message"),
    [
        (bpe, {"model": "t5"}, "tokenizers of the kind 't5' are not supported; supported are llama (SentencePiece)"),
        (bpe, {"pre": "martian"}, "tokenizer.ggml.pre is 'martian'; supported are a.x-4.0, bailingmoe"),
        (bpe, {"tokens": None}, "tokenizer.ggml.tokens is missing"),
        (bpe, {"tokens": ["a"] * 12}, "the token 'a' has the ids 0 and 1"),
        (bpe, {"tokens": 5}, "tokenizer.ggml.tokens must be an array of at most 4194304 strings, not 5"),
        (bpe, {"tokens": [b"\xff"] * 12}, "tokenizer.ggml.tokens has a string that is not valid UTF-8"),
        (bpe, {"merges": None}, "tokenizer.ggml.merges is missing"),
        (bpe, {"merges": ["a b", "ab"]}, "merge 1 must be two tokens with a space between"),
        (
            bpe,
            {"token_type": BPE_TYPES[:3]},
            "token_type must be an array of 12, one for each token, not an array of 3",
        ),
        (bpe, {"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false, not 1"),
        (spm, {"scores": None}, "tokenizer.ggml.scores is missing"),
        (spm, {"scores": np.zeros(3, np.float32)}, "tokenizer.ggml.scores must be an array of 266"),
        (wordpiece, {"unknown_token_id": None}, "tokenizer.ggml.unknown_token_id is missing"),
    ],
)
def test_fault_gguf_tokenizers_that_make_no_sense_are_refused(
    tmp_path: Path, make: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as refused:
        make(tmp_path, **changed)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fault_gguf_random_types_scores_and_ids_never_crash(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = np.random.default_rng(seed)
    for make in (bpe, spm, wordpiece) * 20:
        size = {bpe: len(BPE_TOKENS), spm: len(SPM_TOKENS), wordpiece: 9}[make]
        special = {f"{name}_token_id": int(rng.integers(0, 2 * size)) for name in ("bos", "eos", "unknown", "cls")}
        scores = rng.standard_normal(size).astype(np.float32)
        scores[rng.integers(0, size)] = rng.choice([np.nan, np.inf, -np.inf])
        types = rng.integers(-2, 9, size).astype(np.int32)
        try:
            tokenizer = make(
                tmp_path, token_type=types, scores=scores, add_bos_token=True, add_eos_token=True, **special
            )
            encode(tokenizer, "hi ab <s>[CLS]é", special=True)
        except ModelError:
            continue
        except BaseException as error:  # the library may panic
            pytest.fail(f"seed {seed}: {error!r}")
