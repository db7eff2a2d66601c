"""The scales of stored blocks, from the bytes of a block that are not its integers.

A header [n, bytes] uint8 gives factors [n, groups] and, for some types, offsets [n, groups] in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from tessera.engine.gguf.block_parts import Bytes, Float32Array, grouped_nibbles, half_at, pairs_of_bits, scaled

Scales: TypeAlias = tuple[Float32Array, Float32Array | None]


def _half(header: Bytes) -> Scales:
    """d f16."""
    return half_at(header, 0), None


def _two_halves(header: Bytes) -> Scales:
    """d f16, m f16."""
    return half_at(header, 0), half_at(header, 2)


def _q2_k(header: Bytes) -> Scales:
    """16 bytes of scale (low nibble) and minimum, d f16, dmin f16."""
    packed = header[:, :16]
    factors = scaled(packed & np.uint8(15), half_at(header, 16))
    return factors, -scaled(packed >> np.uint8(4), half_at(header, 18))


def _q3_k(header: Bytes) -> Scales:
    """12 bytes of six-bit scales, d f16; the factor is d (scale - 32)."""
    high = pairs_of_bits(header[:, 8:12], 4).reshape(len(header), 16)
    low = np.concatenate((header[:, :8] & np.uint8(15), header[:, :8] >> np.uint8(4)), axis=1)
    return scaled((low | high << np.uint8(4)).view(np.int8) - np.int8(32), half_at(header, 12)), None


def _with_minima(header: Bytes) -> Scales:
    """d f16, dmin f16, 12 bytes of six-bit scales and minima: Q4_K and Q5_K.

    Bytes 0 to 3 and 4 to 7 hold the first four scales and minima; their highest two bits, and the nibbles of
    bytes 8 to 11, are the last four.
    """
    first, second, last = header[:, 4:8], header[:, 8:12], header[:, 12:16]
    six, four = np.uint8(63), np.uint8(15)
    scales = np.concatenate((first & six, last & four | first >> np.uint8(6) << np.uint8(4)), axis=1)
    minima = np.concatenate((second & six, last >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)), axis=1)
    return scaled(scales, half_at(header, 0)), -scaled(minima, half_at(header, 2))


def _q6_k(header: Bytes) -> Scales:
    """16 int8 scales, d f16."""
    return scaled(header[:, :16].view(np.int8), half_at(header, 16)), None


def _iq4_xs(header: Bytes) -> Scales:
    """d f16, 16 high bits of scales, 4 bytes of their low nibbles; the factor is d (scale - 32)."""
    low = grouped_nibbles(header[:, 4:8], 1).reshape(len(header), 8)
    high = header[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = (low | high.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    return scaled(scales, half_at(header, 0)), None


def _e8m0(header: Bytes) -> Scales:
    """An exponent e (E8M0); the factor is 2^(e - 128)."""
    exponents = header[:, :1].astype(np.uint32)
    # The two smallest factors, 2^-128 and 2^-127, are subnormal.
    bits = np.where(exponents < 2, np.uint32(0x200000) << exponents, (exponents - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32), None


SCALES: dict[str, Callable[[Bytes], Scales]] = {
    "Q4_0": _half,
    "Q4_1": _two_halves,
    "Q5_0": _half,
    "Q5_1": _two_halves,
    "Q8_0": _half,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _with_minima,
    "Q5_K": _with_minima,
    "Q6_K": _q6_k,
    "IQ4_NL": _half,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _e8m0,
}
# Where a block has them, in this order.
HEADER_BYTES: dict[str, tuple[slice, ...]] = {
    "Q4_0": (slice(0, 2),),
    "Q4_1": (slice(0, 4),),
    "Q5_0": (slice(0, 2),),
    "Q5_1": (slice(0, 4),),
    "Q8_0": (slice(0, 2),),
    "Q2_K": (slice(0, 16), slice(80, 84)),
    "Q3_K": (slice(96, 110),),
    "Q4_K": (slice(0, 16),),
    "Q5_K": (slice(0, 16),),
    "Q6_K": (slice(192, 210),),
    "IQ4_NL": (slice(0, 2),),
    "IQ4_XS": (slice(0, 8),),
    "MXFP4": (slice(0, 1),),
}


def header_of(blocks: Bytes, name: str) -> Bytes:
    """[n, bytes of a block] -> [n, bytes of a header]."""
    places = HEADER_BYTES[name]
    return blocks[:, places[0]] if len(places) == 1 else np.concatenate([blocks[:, place] for place in places], axis=1)
