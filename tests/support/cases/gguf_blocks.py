"""Random and extreme blocks of the types that GGUF files have."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.formats import BLOCK_FORMATS

# Byte offsets of a block's float16 scales.
HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def random_blocks(name: str, num_elements: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Blocks [n, bytes of a block] of random bits with moderate scales, for so many elements."""
    type = BLOCK_FORMATS[name].type
    count, block_bytes = num_elements // type.block_size, type.block_bytes
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for start in HALVES[name]:
        scales = rng.uniform(-0.1, 0.1, count).astype("<f2")
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 135, count)
    return blocks


def extreme_blocks(name: str) -> np.ndarray[Any, Any]:
    """Every scale among zeros, the smallest and largest numbers, infinities and NaN, with all bits clear or set."""
    scales = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, np.inf, -np.inf, np.nan], "<f2")
    block_bytes = BLOCK_FORMATS[name].type.block_bytes
    made = []
    for fill in (0x00, 0xFF, 0xAA, 0x55, 0x80, 0x7F):
        for scale in scales:
            block = np.full(block_bytes, fill, np.uint8)
            for start in HALVES[name]:
                block[start : start + 2] = np.frombuffer(scale.tobytes(), np.uint8)
            made.append(block)
    if name == "MXFP4":
        for exponent in (0, 1, 2, 127, 254, 255):
            block = np.arange(block_bytes, dtype=np.uint8) * 17
            block[0] = exponent
            made.append(block)
    return np.array(made)
