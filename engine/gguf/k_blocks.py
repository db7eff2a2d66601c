"""The K-quants: blocks of 256 elements, with a scale (and a minimum) of a few bits for each 16 or 32."""

from __future__ import annotations

import numpy as np

from tessera.engine.gguf.block_parts import Bytes, Float32Array, grouped_nibbles, half_at, pairs_of_bits, scaled


def dequantize_q2_k(blocks: Bytes) -> Float32Array:
    """16 bytes of scale (low nibble) and minimum, 64 bytes of two-bit q, d f16, dmin f16.

    w = (d scale) q - (dmin minimum), for each 16 elements; 32 bytes hold 128 elements, the lowest bits first.
    """
    count = len(blocks)
    packed = blocks[:, :16]
    scales = scaled(packed & np.uint8(15), half_at(blocks, 80))
    minima = scaled(packed >> np.uint8(4), half_at(blocks, 82))
    numbers = pairs_of_bits(blocks[:, 16:80], 32).reshape(count, 16, 16)
    return (scaled(numbers, scales[:, :, None]) - minima[:, :, None]).reshape(count, 256)


def dequantize_q3_k(blocks: Bytes) -> Float32Array:
    """32 bytes of third bits, 64 bytes of two-bit q, 12 bytes of six-bit scales, d f16.

    w = (d (scale - 32)) (q - 4 where the third bit is clear), for each 16 elements.
    """
    count = len(blocks)
    low = pairs_of_bits(blocks[:, 32:96], 32)  # [n, 2, 4, 32]
    # Bit b of byte l belongs to element 32 b + l.
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [n, 8, 32]
    numbers = low.reshape(count, 8, 32) | third << np.uint8(2)
    packed = blocks[:, 96:108]
    high = pairs_of_bits(packed[:, 8:], 4).reshape(count, 16)
    low_scales = np.concatenate((packed[:, :8] & np.uint8(15), packed[:, :8] >> np.uint8(4)), axis=1)
    scales = (low_scales | high << np.uint8(4)).view(np.int8) - np.int8(32)
    factors = scaled(scales, half_at(blocks, 108))
    signed = (numbers.view(np.int8) - np.int8(4)).reshape(count, 16, 16)
    return scaled(signed, factors[:, :, None]).reshape(count, 256)


def dequantize_q4_k(blocks: Bytes) -> Float32Array:
    """d f16, dmin f16, 12 bytes of six-bit scales and minima, 128 bytes of q.

    w = (d scale) q - (dmin minimum), for each 32 elements; 32 bytes hold 64 elements, low nibbles first.
    """
    return _with_minima(blocks, grouped_nibbles(blocks[:, 16:], 32).reshape(len(blocks), 8, 32))


def dequantize_q5_k(blocks: Bytes) -> Float32Array:
    """Like Q4_K, with 32 bytes of fifth bits before the nibbles: bit b of byte l is of element 32 b + l."""
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    low = grouped_nibbles(blocks[:, 48:], 32).reshape(len(blocks), 8, 32)
    return _with_minima(blocks, low | fifth << np.uint8(4))


def dequantize_q6_k(blocks: Bytes) -> Float32Array:
    """128 bytes of low nibbles, 64 bytes of high pairs of bits, 16 int8 scales, d f16.

    w = (d scale) (q - 32), for each 16 elements; 64 bytes of nibbles hold 128 elements, low halves first.
    """
    count = len(blocks)
    low = grouped_nibbles(blocks[:, :128], 64).reshape(count, 2, 4, 32)
    high = pairs_of_bits(blocks[:, 128:192], 32)
    numbers = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    factors = scaled(blocks[:, 192:208].view(np.int8), half_at(blocks, 208))
    return scaled(numbers.reshape(count, 16, 16), factors[:, :, None]).reshape(count, 256)


def _with_minima(blocks: Bytes, numbers: Bytes) -> Float32Array:
    """The formula of Q4_K and Q5_K for `numbers` [n, 8, 32]."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    factors = scaled(scales, half_at(blocks, 0))
    offsets = scaled(minima, half_at(blocks, 2))
    result = scaled(numbers, factors[:, :, None])
    result -= offsets[:, :, None]
    return result.reshape(len(blocks), 256)


def scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Two times [n, 8] numbers of six bits from [n, 12].

    Bytes 0 to 3 and 4 to 7 hold the first four scales and minima; their highest two bits, and the nibbles of
    bytes 8 to 11, are the last four.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six = np.uint8(63)
    scales = (first & six, last & np.uint8(15) | first >> np.uint8(6) << np.uint8(4))
    minima = (second & six, last >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4))
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)
