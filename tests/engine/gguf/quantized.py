"""Weights of small models in GGUF blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tessera.engine.formats import BLOCK_FORMATS
from tessera.engine.gguf.blocks import dequantize
from tests.engine.gguf.converter import plain, write_converted
from tests.engine.gguf.writer import Stored
from tests.support.cases.gguf_blocks import random_blocks
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build, make_tensors, write_safetensors

Array = np.ndarray[Any, Any]
QUANTIZED = list(BLOCK_FORMATS)
WIDE = TinyModel(
    "llama-wide",
    {**TINY_MODELS["llama"].config, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
)


class Quantizer:
    """Stores every matrix in the next of `types`; `exact` has what the stored bytes stand for."""

    def __init__(self, *types: str) -> None:
        self.types = types
        self.exact: dict[str, Array] = {}
        self._rng = np.random.default_rng(7)

    def __call__(self, name: str, values: Array) -> Stored:
        if values.ndim == 1:
            return plain(name, values)
        chosen = self.types[len(self.exact) % len(self.types)]
        if chosen == "F32":
            self.exact[name] = values
            return plain(name, values)
        type = BLOCK_FORMATS[chosen].type
        rows, columns = values.shape
        blocks = random_blocks(chosen, rows * columns, self._rng)
        stored = blocks.reshape(rows, -1)
        self.exact[name] = dequantize(stored, type)
        return Stored(chosen, values.shape, stored.tobytes())


def quantized(folder: Path, *types: str) -> tuple[Path, Path]:
    """A GGUF file of random blocks, and a folder with the numbers that they stand for."""
    quantizer = Quantizer(*types)
    path = write_converted(folder / "m.gguf", WIDE, quantizer)
    plain_folder = build(WIDE, folder / "folder")
    tensors = make_tensors(WIDE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, values in tensors.items():
        stem, _, suffix = name.rpartition(".")
        exact = quantizer.exact.get(f"{names.get_name(stem)}.{suffix}")
        if exact is None:
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = WIDE.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            exact = exact.reshape(heads, -1, 2, exact.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensors[name] = exact
    write_safetensors(plain_folder / "model.safetensors", tensors)
    return path, plain_folder
