"""Blocks dequantised in float64, element by element as the format is specified, and blocks to try it on.

Every function takes the bytes of one block and yields, for each element, the terms that are added up, so that an
error can be measured against their magnitude.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

Terms = tuple[float, float]  # product, minus what is subtracted

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _half(block: bytes, start: int) -> float:
    return float(struct.unpack_from("<e", block, start)[0])


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _nibble(qs: bytes, element: int) -> int:
    """Of 16 bytes for 32 elements."""
    return qs[element] & 15 if element < 16 else qs[element - 16] >> 4


def q4_0(block: bytes) -> Iterator[Terms]:
    for i in range(32):
        yield _half(block, 0) * (_nibble(block[2:], i) - 8), 0.0


def q4_1(block: bytes) -> Iterator[Terms]:
    for i in range(32):
        yield _half(block, 0) * _nibble(block[4:], i), _half(block, 2)


def q5_0(block: bytes) -> Iterator[Terms]:
    (high,) = struct.unpack_from("<I", block, 2)
    for i in range(32):
        yield _half(block, 0) * ((_nibble(block[6:], i) | (high >> i & 1) << 4) - 16), 0.0


def q5_1(block: bytes) -> Iterator[Terms]:
    (high,) = struct.unpack_from("<I", block, 4)
    for i in range(32):
        yield _half(block, 0) * (_nibble(block[8:], i) | (high >> i & 1) << 4), _half(block, 2)


def q8_0(block: bytes) -> Iterator[Terms]:
    for i in range(32):
        yield _half(block, 0) * _signed(block[2 + i]), 0.0


def q2_k(block: bytes) -> Iterator[Terms]:
    for i in range(256):
        scale = block[i // 16]
        quant = block[16 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        yield _half(block, 80) * (scale & 15) * quant, -_half(block, 82) * (scale >> 4)


def q3_k(block: bytes) -> Iterator[Terms]:
    packed = block[96:108]
    for i in range(256):
        group = i // 16
        low = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
        scale = (low | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
        quant = block[32 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        third = block[i % 32] >> i // 32 & 1
        yield _half(block, 108) * scale * (quant - (0 if third else 4)), 0.0


def _scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
    return scale, packed[group + 4] >> 4 | packed[group] >> 6 << 4


def q4_k(block: bytes) -> Iterator[Terms]:
    for i in range(256):
        scale, minimum = _scale_and_minimum(block[4:16], i // 32)
        byte = block[16 + i // 64 * 32 + i % 32]
        quant = byte & 15 if i % 64 < 32 else byte >> 4
        yield _half(block, 0) * scale * quant, -_half(block, 2) * minimum


def q5_k(block: bytes) -> Iterator[Terms]:
    for i in range(256):
        scale, minimum = _scale_and_minimum(block[4:16], i // 32)
        byte = block[48 + i // 64 * 32 + i % 32]
        quant = (byte & 15 if i % 64 < 32 else byte >> 4) + 16 * (block[16 + i % 32] >> i // 32 & 1)
        yield _half(block, 0) * scale * quant, -_half(block, 2) * minimum


def q6_k(block: bytes) -> Iterator[Terms]:
    for i in range(256):
        half, within = divmod(i, 128)
        byte = block[half * 64 + within % 64]
        low = byte & 15 if within < 64 else byte >> 4
        high = block[128 + half * 32 + within % 32] >> 2 * (within // 32) & 3
        yield _half(block, 208) * _signed(block[192 + i // 16]) * ((low | high << 4) - 32), 0.0


def iq4_nl(block: bytes) -> Iterator[Terms]:
    for i in range(32):
        yield _half(block, 0) * IQ4_VALUES[_nibble(block[2:], i)], 0.0


def iq4_xs(block: bytes) -> Iterator[Terms]:
    (high,) = struct.unpack_from("<H", block, 2)
    for i in range(256):
        group = i // 32
        scale = (block[4 + group // 2] >> 4 * (group % 2) & 15 | (high >> 2 * group & 3) << 4) - 32
        yield _half(block, 0) * scale * IQ4_VALUES[_nibble(block[8 + 16 * group :], i % 32)], 0.0


def mxfp4(block: bytes) -> Iterator[Terms]:
    for i in range(32):
        quant = _nibble(block[1:], i)
        magnitude = E2M1_VALUES[quant & 7]
        yield 2.0 ** (block[0] - 127) * (-magnitude if quant & 8 else magnitude), 0.0


REFERENCES = {
    function.__name__.upper(): function
    for function in (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4)
}

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


def random_blocks(name: str, count: int, block_bytes: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Blocks [count, block_bytes] of random bits with moderate scales."""
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for start in HALVES[name]:
        scales = rng.uniform(-0.1, 0.1, count).astype("<f2")
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 135, count)
    return blocks


def extreme_blocks(name: str, block_bytes: int) -> np.ndarray[Any, Any]:
    """Every scale among zeros, the smallest and largest numbers, infinities and NaN, with all bits clear or set."""
    scales = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, np.inf, -np.inf, np.nan], "<f2")
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
