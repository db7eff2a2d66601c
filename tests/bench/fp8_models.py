"""FP8 checkpoints of the benchmark architectures with random weights; embeddings and head have 16 bits.

.fp8: as compressed-tensors publishes them, linear layers with a scale for each row, activations by token. .fp8-blocks:
as Qwen and DeepSeek publish theirs, with scales of 128 x 128, activations by 128 of a token.
`python -m tests.bench.fp8_models llama-8b.fp8 FOLDER` writes 9.1 GB.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.bench.models import CONFIGS, LLAMA_8B, write_model

LLAMA_3B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
FP8_CONFIGS: dict[str, dict[str, Any]] = {**CONFIGS, "llama-3b": LLAMA_3B}
BLOCK = 128
BY_ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
BY_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
QUANTISATIONS = {".fp8": BY_ROWS, ".fp8-blocks": BY_BLOCKS}
# The architecture of each model, and how it is quantised.
FP8_MODELS = {name + end: (name, quantisation) for end, quantisation in QUANTISATIONS.items() for name in FP8_CONFIGS}
PIECE = 1 << 24  # elements of a random tensor: longer ones repeat them
ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
DEVIATION = 0.02  # of weights


class Stored(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def write_fp8_model(root: Path, name: str, seed: int = 0) -> Path:
    """Make `root/name` of FP8_MODELS, a folder with config.json, a tokenizer and model.safetensors."""
    architecture, quantisation = FP8_MODELS[name]
    config = FP8_CONFIGS[architecture]
    folder = write_model(root, name, config)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}, indent=1))
    header, offset = {}, 0
    stored = list(_tensors(name))
    for tensor in stored:
        offsets = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        offset += tensor.nbytes
    front = json.dumps(header).encode()
    front += b" " * (-len(front) % 8)
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x70, PIECE, dtype=np.uint8) | rng.integers(0, 2, PIECE, dtype=np.uint8) << 7
    halves = ((rng.standard_normal(PIECE) * DEVIATION).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(front)) + front)
        for tensor in stored:
            file.write(_bytes(tensor, codes, halves))
    return folder


def fp8_decode_bytes(name: str) -> int:
    """Bytes of weights that one decode step must read: all but an untied embedding table."""
    has_head = not FP8_CONFIGS[FP8_MODELS[name][0]]["tie_word_embeddings"]
    unread = {"model.embed_tokens.weight"} if has_head else set()
    return sum(tensor.nbytes for tensor in _tensors(name) if tensor.name not in unread)


def _bytes(tensor: Stored, codes: Any, halves: Any) -> bytes:
    if tensor.dtype == "F8_E4M3":
        return np.resize(codes, tensor.nbytes).tobytes()
    if tensor.dtype == "F32":
        return np.full(tensor.shape, DEVIATION / 100, np.float32).tobytes()
    ones = len(tensor.shape) == 1
    return (np.full(tensor.shape, 0x3F80, np.uint16) if ones else np.resize(halves, tensor.shape)).tobytes()


def _tensors(name: str) -> Iterator[Stored]:
    architecture, quantisation = FP8_MODELS[name]
    config = FP8_CONFIGS[architecture]
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield Stored("model.embed_tokens.weight", "BF16", (vocab, hidden))
    yield Stored("model.norm.weight", "BF16", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Stored("lm_head.weight", "BF16", (vocab, hidden))
    matrices = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(config["num_hidden_layers"]):
        before = f"model.layers.{layer}."
        for norm, width in norms.items():
            yield Stored(f"{before}{norm}.weight", "BF16", (width,))
        for matrix, shape in matrices.items():
            yield Stored(f"{before}{matrix}.weight", "F8_E4M3", shape)
            if quantisation is BY_BLOCKS:
                blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
                yield Stored(f"{before}{matrix}.weight_scale_inv", "F32", blocks)
            else:
                yield Stored(f"{before}{matrix}.weight_scale", "F32", (shape[0], 1))


if __name__ == "__main__":
    print(write_fp8_model(Path(sys.argv[2]), sys.argv[1]))
