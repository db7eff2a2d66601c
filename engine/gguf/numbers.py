"""The integers of stored blocks: [n, bytes of a block] uint8 -> [n, elements] uint8.

Layouts as ggml defines them (ggml-common.h and the dequantising rows of ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.engine.gguf.block_parts import Bytes, grouped_nibbles, nibbles, pairs_of_bits


def _q5(high: Bytes, low: Bytes) -> Bytes:
    """32 fifth bits, then 16 bytes: low nibbles are the first 16 elements."""
    result = nibbles(low)
    result |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return result


def _q2_k(blocks: Bytes) -> Bytes:
    """64 bytes of two-bit q: 32 bytes hold 128 elements, the lowest bits first."""
    return pairs_of_bits(blocks[:, 16:80], 32).reshape(len(blocks), 256)


def _q3_k(blocks: Bytes) -> Bytes:
    """32 bytes of third bits, 64 bytes of two-bit q."""
    low = pairs_of_bits(blocks[:, 32:96], 32).reshape(len(blocks), 8, 32)
    return (low | _bit_planes(blocks[:, :32]) << np.uint8(2)).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Bytes:
    """128 bytes of q: 32 bytes hold 64 elements, low nibbles first."""
    return grouped_nibbles(blocks[:, 16:], 32).reshape(len(blocks), 256)


def _q5_k(blocks: Bytes) -> Bytes:
    """Like Q4_K, with 32 bytes of fifth bits before the nibbles."""
    low = grouped_nibbles(blocks[:, 48:], 32).reshape(len(blocks), 8, 32)
    return (low | _bit_planes(blocks[:, 16:48]) << np.uint8(4)).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Bytes:
    """128 bytes of low nibbles, 64 of which hold 128 elements, low halves first; 64 bytes of high pairs of bits."""
    low = grouped_nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    return (low | pairs_of_bits(blocks[:, 128:192], 32) << np.uint8(4)).reshape(-1, 256)


def _bit_planes(packed: Bytes) -> Bytes:
    """[n, 32] -> [n, 8, 32]: bit b of byte l belongs to element 32 b + l."""
    return packed[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)


NUMBERS: dict[str, Callable[[Bytes], Bytes]] = {
    "Q4_0": lambda blocks: nibbles(blocks[:, 2:]),
    "Q4_1": lambda blocks: nibbles(blocks[:, 4:]),
    "Q5_0": lambda blocks: _q5(blocks[:, 2:6], blocks[:, 6:]),
    "Q5_1": lambda blocks: _q5(blocks[:, 4:8], blocks[:, 8:]),
    "Q8_0": lambda blocks: blocks[:, 2:],
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda blocks: nibbles(blocks[:, 2:]),
    "IQ4_XS": lambda blocks: grouped_nibbles(blocks[:, 8:], 16).reshape(len(blocks), 256),
    "MXFP4": lambda blocks: nibbles(blocks[:, 1:]),
}
