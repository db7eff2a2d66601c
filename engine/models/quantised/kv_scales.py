"""The scales of a KV cache in FP8, where a checkpoint has some."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.tensor import float32

# Of keys and values, below an attention module: vLLM and llm-compressor; ModelOpt; AutoFP8.
NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)


def find_kv_scales(names: Collection[str], module: str) -> tuple[str, str] | None:
    """The names of both tensors of an attention module, where both are there."""
    pairs = ((f"{module}.{keys}", f"{module}.{values}") for keys, values in NAMES)
    return next((pair for pair in pairs if all(name in names for name in pair)), None)


def read_kv_scales(
    pair: tuple[str, str], num_kv_heads: int, tensor: Callable[[str], Any], path: Callable[[str], Path]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[2, num_kv_heads] float32 of tensors with one number or one for each head.

    Raises: ModelError naming the tensor that has others, or numbers that are not positive.
    """
    found = []
    for name in pair:
        stored = np.asarray(tensor(name)[...]).astype(float32).reshape(-1)
        if stored.size not in (1, num_kv_heads):
            raise ModelError(f"{path(name)}: tensor {name} has {stored.size} numbers, not 1 or {num_kv_heads}")
        if not (np.isfinite(stored).all() and (stored > 0).all()):
            raise ModelError(f"{path(name)}: tensor {name} has a scale that is not positive")
        found.append(np.broadcast_to(stored, (num_kv_heads,)))
    return np.stack(found)
