"""GGUF files of the benchmark architectures with random weights, in the mix of types that Q4_K_M has.

`python -m tests.bench.gguf_models llama-8b llama-8b.gguf` writes 4.9 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tessera.engine.formats import BLOCK_FORMATS
from tests.bench.models import CONFIGS
from tests.engine.gguf import writer
from tests.engine.gguf.converter import metadata_of

CHUNK_ROWS = 4096
ALIGNMENT = 32
LLAMA_1B = {
    **CONFIGS["llama-8b"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
GGUF_CONFIGS: dict[str, dict[str, Any]] = {**CONFIGS, "llama-1b": LLAMA_1B}

# Scales with which random bits become weights of a deviation near 0.02, at their byte offsets.
SCALES = {"Q4_K": {0: 1e-4, 2: 7.5e-4}, "Q6_K": {208: 1.5e-5}}


def write_gguf_model(path: Path, name: str, seed: int = 0) -> Path:
    """Made row by row: memory holds a few thousand of them."""
    config = GGUF_CONFIGS[name]
    metadata = {**metadata_of(config), **_vocabulary(config["vocab_size"])}
    tensors = list(_tensors(config))
    entries, offset = b"", 0
    for tensor, type_name, shape in tensors:
        entries += writer.entry(tensor, writer.TYPE_NUMBERS[type_name], shape, offset)
        offset += -(-_nbytes(type_name, shape) // ALIGNMENT) * ALIGNMENT
    front = writer.header(len(tensors), len(metadata))
    front += b"".join(writer.pair(key, value) for key, value in metadata.items()) + entries
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(front + bytes(-len(front) % ALIGNMENT))
        for _, type_name, shape in tensors:
            _write_tensor(file, type_name, shape, rng)
            file.write(bytes(-_nbytes(type_name, shape) % ALIGNMENT))
    return path


def gguf_decode_bytes(name: str) -> int:
    """Bytes of weights that one decode step must read: all but an untied embedding table."""
    config = GGUF_CONFIGS[name]
    read = [
        _nbytes(type_name, shape)
        for tensor, type_name, shape in _tensors(config)
        if config["tie_word_embeddings"] or tensor != "token_embd.weight"
    ]
    return sum(read)


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape, contiguous dimension last, in the order in which llama.cpp writes them."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim, layers = config["head_dim"], config["num_hidden_layers"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tied = config["tie_word_embeddings"]
    yield "token_embd.weight", "Q6_K" if tied else "Q4_K", (vocab, hidden)
    yield "output_norm.weight", "F32", (hidden,)
    if not tied:
        yield "output.weight", "Q6_K", (vocab, hidden)
    for layer in range(layers):
        # llama.cpp gives more bits to the first and last eighth of the layers, and to every third between.
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        at, wide = f"blk.{layer}.", "Q6_K" if more else "Q4_K"
        yield at + "attn_norm.weight", "F32", (hidden,)
        yield at + "attn_q.weight", "Q4_K", (q_rows, hidden)
        yield at + "attn_k.weight", "Q4_K", (kv_rows, hidden)
        yield at + "attn_v.weight", wide, (kv_rows, hidden)
        yield at + "attn_output.weight", "Q4_K", (hidden, q_rows)
        if config["model_type"] == "qwen3":
            yield at + "attn_q_norm.weight", "F32", (head_dim,)
            yield at + "attn_k_norm.weight", "F32", (head_dim,)
        yield at + "ffn_norm.weight", "F32", (hidden,)
        yield at + "ffn_gate.weight", "Q4_K", (inner, hidden)
        yield at + "ffn_up.weight", "Q4_K", (inner, hidden)
        yield at + "ffn_down.weight", wide, (hidden, inner)


def _nbytes(type_name: str, shape: tuple[int, ...]) -> int:
    if type_name == "F32":
        return int(4 * np.prod(shape))
    return BLOCK_FORMATS[type_name].nbytes(*shape)


def _write_tensor(file: BinaryIO, type_name: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    if type_name == "F32":
        file.write(np.ones(shape, "<f4").tobytes())
        return
    type = BLOCK_FORMATS[type_name].type
    for start in range(0, shape[0], CHUNK_ROWS):
        rows = min(CHUNK_ROWS, shape[0] - start)
        raw = rng.bytes(rows * type.row_bytes(shape[1]))
        blocks = np.frombuffer(bytearray(raw), np.uint8).reshape(-1, type.block_bytes)
        for place, scale in SCALES[type_name].items():
            blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        file.write(blocks.tobytes())


def _vocabulary(size: int) -> dict[str, Any]:
    """SentencePiece's form: three control tokens, single bytes, words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256, *[1] * (size - len(tokens))]
    tokens += [f"\u2581w{token_id}" for token_id in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(size, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }


if __name__ == "__main__":
    print(write_gguf_model(Path(sys.argv[2]), sys.argv[1]))
