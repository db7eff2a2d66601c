"""Blocks dequantised in float64, element by element as the format is specified.

Every function takes the bytes of one block and yields, for each element, the terms that are added up, so that an
error can be measured against their magnitude.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
