"""Sampling parameters that a GGUF file recommends, as generation_config.json would name them.

Keys: llama.cpp, gguf-py/gguf/constants.py, `general.sampling.*`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tessera.engine.gguf.metadata import Metadata
from tessera.engine.gguf.model import open_gguf

PREFIX = "general.sampling."
NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_gguf_sampling(path: Path) -> tuple[dict[str, int | float], list[str]]:
    """Recommendations of the file at `path` by the names of generation_config.json, and the keys that are left out.

    Raises: ModelError naming the file.
    """
    metadata = open_gguf(path).metadata
    found: dict[str, int | float] = {}
    left_out = []
    for key in sorted(key for key in metadata.keys if key.startswith(PREFIX)):
        name = NAMES.get(key.removeprefix(PREFIX))
        value = None if name is None else _number(metadata, key)
        if name is None or value is None:
            left_out.append(key)
        elif name == "top_k":
            found[name] = max(int(value), 0)  # below 1 it chooses among all tokens
        elif name == "temperature":
            found[name] = max(value, 0.0)  # below 0 it is greedy, as 0 is
        else:
            found[name] = value
    return found, left_out


def _number(metadata: Metadata, key: str) -> float | None:
    """A float32 as the shortest decimal that stands for it; None for what is no finite number."""
    value = metadata.scalar(key)
    if isinstance(value, (bool, str)) or value is None or not math.isfinite(value):
        return None
    return float(str(np.float32(value)))
