"""GGUF files: what is read, and the sentence that each kind of malformed file gets."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.model import open_gguf
from tests.engine.gguf import writer
from tests.engine.gguf.writer import Stored, gguf_bytes, header, pair, string, write_gguf

TENSORS = {
    "a": Stored.of(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "b": Stored("Q8_0", (3, 64), bytes(range(204))),
}
METADATA = {
    "general.architecture": "llama",
    "count": 7,
    "ratio": 0.5,
    "flag": True,
    "words": ["one", "two", ""],
    "table": np.array([1, -2, 3], np.int16),
    "nested": [[1, 2], [3]],
    "negative": -5,
}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(METADATA, TENSORS, version))
    model = open_gguf(path)
    metadata = model.metadata
    assert metadata.keys == set(METADATA)
    assert metadata.string("general.architecture") == "llama"
    assert metadata.integer("count", 0, 10) == 7
    assert metadata.integer("negative", -10, 10) == -5
    assert metadata.number("ratio", 0, 1) == 0.5
    assert metadata.boolean("flag") is True
    assert metadata.strings("words", 3) == ["one", "two", ""]
    assert metadata.integers("table").tolist() == [1, -2, 3]
    assert model.tensors["a"].shape == (2, 3)
    assert model.stored("a").view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.stored("b").shape == (3, 68)
    assert model.stored("b").tobytes() == bytes(range(204))
    assert model.count_types() == {"F32": 24, "Q8_0": 204}


def test_the_alignment_of_the_file_counts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": 128}, TENSORS)
    assert open_gguf(path).tensors["a"].begin % 128 == 0
    assert open_gguf(path).stored("b").tobytes() == bytes(range(204))


def entry_of(name: str = "a", number: int = 0, shape: tuple[int, ...] = (8,), offset: int = 0) -> bytes:
    return writer.entry(name, number, shape, offset)


def with_entries(*entries: bytes, data: int = 64) -> bytes:
    front = header(len(entries), 0) + b"".join(entries)
    return front + bytes(-len(front) % 32) + bytes(data)


def with_pair(kind: int, raw: bytes) -> bytes:
    return header(0, 1) + string("k") + struct.pack("<I", kind) + raw


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 1) + bytes(4)


WRONG = {
    "empty": (b"", "cannot be read"),
    "short": (b"GG", "truncated"),
    "magic": (b"GGML" + bytes(60), "is not a GGUF file: it begins with b'GGML'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    "version 1": (header(0, 0, 1), "of version 1; versions 2 and 3 are read"),
    "version 4": (header(0, 0, 4), "of version 4; versions 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (header(0, 0)[:12], "truncated: the number of tensors needs 8 bytes"),
    "keys": (header(0, 2**60), "claims 1152921504606846976 keys"),
    "keys truncated": (header(0, 100) + bytes(50), "claims 100 keys, 50 bytes are left"),
    "tensors": (header(2**63, 0), "claims 9223372036854775808 tensors"),
    "tensors truncated": (header(100, 0) + bytes(50), "claims 100 tensors, 50 bytes are left"),
    "key name": (header(0, 1) + struct.pack("<Q", 2**40) + bytes(99), "the name of key 0 claims 1099511627776 bytes"),
    "key not text": (header(0, 1) + string(b"\xff\xfe") + bytes(99), "name of key 0 is not valid UTF-8"),
    "key twice": (header(0, 2) + pair("k", 1) * 2, "the key 'k' occurs twice"),
    "value type": (with_pair(13, bytes(8)), "values of type 13"),
    "string length": (with_pair(8, struct.pack("<Q", 2**62)), "claims 4611686018427387904 bytes"),
    "string truncated": (with_pair(8, struct.pack("<Q", 100) + bytes(50)), "truncated in the last string"),
    "array length": (with_pair(9, struct.pack("<IQ", 4, 2**61)), "needs 9223372036854775808 bytes"),
    "array of strings": (with_pair(9, struct.pack("<IQ", 8, 2**61)), "strings"),
    "array of arrays": (with_pair(9, struct.pack("<IQ", 9, 2**61)), "claims 2305843009213693952 arrays"),
    "nesting": (with_pair(9, nested(4)), "nested more than 4 deep"),
    "alignment": (header(0, 1) + pair("general.alignment", 24), "power of two from 8"),
    "alignment 0": (header(0, 1) + pair("general.alignment", 0), "from 8 to 65536, not 0"),
    "dimensions": (with_entries(entry_of(shape=(1,) * 5)), "has 5 dimensions"),
    "no dimensions": (with_entries(entry_of(shape=()) + bytes(8)), "has 0 dimensions"),
    "shape": (with_entries(entry_of(shape=(2**40, 2**40))), "impossible shape"),
    "zero shape": (with_entries(entry_of(shape=(0, 8))), "impossible shape"),
    "unknown type": (with_entries(entry_of(number=77)), "of the unknown type 77"),
    "IQ type": (with_entries(entry_of(number=16, shape=(256,))), "stored as IQ2_XXS, which is not supported"),
    "IQ1 type": (with_entries(entry_of(number=29, shape=(256,))), "stored as IQ1_M, which is not supported"),
    "block": (
        with_entries(entry_of(number=12, shape=(2, 128))),
        "rows of 128 elements, but Q4_K takes",
    ),
    "misaligned": (with_entries(entry_of(offset=8)), "offset 8, which is not a multiple of the alignment 32"),
    "beyond the end": (with_entries(entry_of(shape=(17,))), "but the file has"),
    "far offset": (with_entries(entry_of(offset=2**63)), "but the file has"),
    "overlap": (with_entries(entry_of("x", shape=(9,)), entry_of("y", offset=32)), "the tensors 'x' and 'y' overlap"),
    "tensor twice": (with_entries(entry_of(), entry_of(offset=32)), "tensor 'a' occurs twice"),
    "tensor name": (with_entries(entry_of("n" * 300)), "the name of tensor 0 claims 300 bytes"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_fault_gguf_malformed_files_are_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    raw, message = WRONG[kind]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError) as refused:
        open_gguf(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fault_gguf_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes(METADATA, TENSORS)
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            open_gguf(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match="is not a file"):
            open_gguf(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.integer("absent", 1, 9), "absent is missing; it must be an integer from 1 to 9"),
        (lambda m: m.integer("count", 1, 5), "count must be an integer from 1 to 5, not 7"),
        (lambda m: m.integer("flag", 0, 5), "flag must be an integer from 0 to 5, not True"),
        (lambda m: m.integer("words", 0, 5), "words must be an integer from 0 to 5, not an array of 3"),
        (lambda m: m.string("count"), "count must be a string, not 7"),
        (lambda m: m.number("general.architecture", 0, 1), "must be a number from 0 to 1, not 'llama'"),
        (lambda m: m.boolean("count"), "count must be true or false"),
        (lambda m: m.strings("words", 2), "words must be an array of at most 2 strings, not an array of 3"),
        (lambda m: m.strings("table", 9), "table must be an array of at most 9 strings"),
        (lambda m: m.integers("words"), "words must be an array of numbers"),
        (lambda m: m.numbers("nested"), "nested must be an array of numbers"),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, call, message: str) -> None:  # type: ignore[no-untyped-def]
    metadata = open_gguf(write_gguf(tmp_path / "m.gguf", METADATA)).metadata
    with pytest.raises(ModelError) as refused:
        call(metadata)
    assert message in str(refused.value)


def test_a_header_is_gone_over_once_until_the_file_changes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA)
    first = open_gguf(path)
    assert open_gguf(path) is first
    other = write_gguf(tmp_path / "other.gguf", {**METADATA, "general.architecture": "qwen2"})
    other.replace(path)
    assert open_gguf(path).metadata.string("general.architecture") == "qwen2"


# -- split models ---------------------------------------------------------------------------------


def write_split(folder: Path, total: int = 2) -> list[Path]:
    paths = []
    for number, (name, tensor) in enumerate(TENSORS.items()):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": total}
        first = METADATA if number == 0 else {}
        paths.append(write_gguf(folder / f"m-{number + 1:05}-of-00002.gguf", {**first, **keys}, {name: tensor}))
    return paths


@pytest.mark.parametrize("named", [0, 1])
def test_a_split_model_is_read_whole_whichever_file_is_named(tmp_path: Path, named: int) -> None:
    paths = write_split(tmp_path)
    model = open_gguf(paths[named])
    assert model.path == paths[0]
    assert model.metadata.string("general.architecture") == "llama"
    assert model.stored("b").tobytes() == bytes(range(204))
    assert [model.file_of(name) for name in ("a", "b")] == paths


def test_split_models_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first, second = write_split(tmp_path, total=3)
    with pytest.raises(ModelError, match=r"split.tensors.count is 3, but the files have 2 tensors"):
        open_gguf(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="says it is file 1 of 2"):
        open_gguf(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"lacks m-00002-of-00002.gguf, into which the model was split"):
        open_gguf(first)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"must end in -00001-of-00002.gguf"):
        open_gguf(renamed)
