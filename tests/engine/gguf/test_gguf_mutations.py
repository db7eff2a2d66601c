"""Mutated GGUF headers: one sentence or a right answer, quickly, and nothing allocated above what the file backs.

`make test-long` tries more of them.
"""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.model import GGUFModel, open_gguf
from tessera.engine.gguf.tokenizer import read_gguf_tokenizer
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.engine.gguf.converter import convert
from tests.engine.gguf.writer import Stored, gguf_bytes
from tests.support.models.tiny_models import TINY_MODELS, make_tensors

MAX_SECONDS = 0.1  # of processor time
SPARE_BYTES = 64 * 2**20
HOSTILE = (0, 1, 7, 8, 9, 0x7F, 0x80, 0xFF, *(2**bits - 1 for bits in (31, 32, 63, 64)), 2**16, 2**40, 2**61, 2**63)


def whole_file() -> bytes:
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(24)],
        "tokenizer.ggml.scores": np.arange(24, dtype=np.float32),
        "tokenizer.ggml.token_type": np.ones(24, np.int32),
        "tokenizer.ggml.add_bos_token": True,
        "nested": [[1, 2], [3, 4]],
        "split.count": 1,
    }
    tensors = {
        "token_embd.weight": Stored("Q4_0", (4, 32), bytes(72)),
        "output_norm.weight": Stored.of(np.ones(32)),
        "blk.0.attn_q.weight": Stored("Q6_K", (2, 256), bytes(420)),
    }
    return gguf_bytes(metadata, tensors)


def mutated(whole: bytes, rng: random.Random, *, keep_length: bool = False) -> bytes:
    raw = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(raw))
        kind = rng.randrange(3 if keep_length else 7)
        if kind == 0:
            raw[place] = rng.randrange(256)
        elif kind == 1:
            raw[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            size = rng.choice((4, 8))
            place = min(place, len(raw) - size)
            raw[place : place + size] = struct.pack("<Q", rng.choice(HOSTILE))[:size]
        elif kind == 3:
            del raw[place : place + rng.randrange(1, 32)]
        elif kind == 4:
            raw[place:place] = rng.randbytes(rng.randrange(1, 32))
        elif kind == 5:
            length = rng.randrange(1, 200)
            raw[place:place] = raw[(start := rng.randrange(len(raw))) : start + length]
        else:
            del raw[max(place, 24) :]
        raw = raw or bytearray(b"G")
    return bytes(raw)


def read_all(model: GGUFModel) -> None:
    for key in model.metadata.keys:
        for read in (model.metadata.scalar, model.metadata.numbers, model.metadata.booleans):
            try:
                read(key)
            except ModelError:
                continue
        try:
            model.metadata.strings(key, 2**16)
        except ModelError:
            continue
    for name in model.tensors:
        assert model.stored(name).nbytes == model.tensors[name].nbytes


def test_fault_gguf_mutated_headers(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole, path = whole_file(), tmp_path / "mutated.gguf"
    read = refused = 0
    sentences = set()
    tracemalloc.start()
    try:
        for number in range(pytestconfig.getoption("gguf_mutations")):
            raw = mutated(whole, rng)
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            begun = time.process_time()
            try:
                read_all(open_gguf(path))
                read += 1
            except ModelError as error:
                refused += 1
                sentences.add(str(error))
            seconds = time.process_time() - begun
            allocated = tracemalloc.get_traced_memory()[1] - before
            assert seconds < MAX_SECONDS, f"seed {seed}, file {number}: {seconds:.3f} s"
            assert allocated < len(raw) + SPARE_BYTES, f"seed {seed}, file {number}: {allocated} bytes"
    finally:
        tracemalloc.stop()
    assert not [sentence for sentence in sentences if "\n" in sentence], f"seed {seed}"
    assert read, f"seed {seed}: every file was refused"
    assert refused > read / 4, f"seed {seed}: {refused} files refused, {read} read"


def whole_model(path: Path) -> bytes:
    """Small enough for a mutation to hit what matters."""
    model = TINY_MODELS["llama-llama3"]
    config = {**model.config, "num_hidden_layers": 1}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "\u0120", "<s>", "</s>"],
        "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 3, 3], np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.chat_template": "{{ messages }}",
    }
    tensors = {name: values for name, values in make_tensors(model).items() if ".1." not in name and ".2." not in name}
    return convert(path, config, tensors, metadata=metadata).read_bytes()


def test_fault_gguf_mutated_models_are_loaded_or_refused(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Configuration, weights, tokenizer and templates: whatever is wrong, it is a ModelError."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "mutated.gguf"
    whole, ops = whole_model(path), make_ops(CPU)
    header_end = min(info.begin for info in open_gguf(path).tensors.values())
    loaded = refused = 0
    for number in range(pytestconfig.getoption("gguf_mutations") // 5):
        path.write_bytes(mutated(whole[:header_end], rng, keep_length=True) + whole[header_end:])
        for load in (lambda: load_weights(path, load_config(path), float32, ops), lambda: read_gguf_tokenizer(path)):
            try:
                load()
                loaded += 1
            except ModelError:
                refused += 1
            except BaseException as error:  # the tokenizers library may panic
                pytest.fail(f"seed {seed}, file {number}: {error!r}")
    assert loaded, f"seed {seed}: everything was refused"
    assert refused, f"seed {seed}: nothing was refused"


@pytest.mark.parametrize("nesting", [1, 2, 3])
def test_fault_gguf_a_header_full_of_empty_arrays_takes_no_more_than_the_file(tmp_path: Path, nesting: int) -> None:
    count = 50_000
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    raw += struct.pack("<IQ", 9, 1) * (nesting - 1) + struct.pack("<IQ", 9, count) + struct.pack("<IQ", 8, 0) * count
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < len(raw)
    finally:
        tracemalloc.stop()
