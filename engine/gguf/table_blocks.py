"""Blocks of four-bit numbers that choose a value from a table of 16."""

from __future__ import annotations

import numpy as np

from tessera.engine.gguf.block_parts import Bytes, Float32Array, grouped_nibbles, half_at, nibbles, scaled

# Values of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# Twice the values of E2M1 (Open Compute Project, Microscaling Formats 1.0, table 5).
TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def dequantize_iq4_nl(blocks: Bytes) -> Float32Array:
    """d f16, 16 bytes: w = d NONLINEAR[q]; low nibbles are the first 16 of 32."""
    return scaled(NONLINEAR[nibbles(blocks[:, 2:])], half_at(blocks, 0))


def dequantize_iq4_xs(blocks: Bytes) -> Float32Array:
    """d f16, 16 high bits of scales, 4 bytes of their low nibbles, 128 bytes of q.

    w = (d (scale - 32)) NONLINEAR[q], for each 32 of 256 elements.
    """
    count = len(blocks)
    low = grouped_nibbles(blocks[:, 4:8], 1).reshape(count, 8)
    high = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = (low | high.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    factors = scaled(scales, half_at(blocks, 0))
    numbers = NONLINEAR[grouped_nibbles(blocks[:, 8:], 16).reshape(count, 8, 32)]
    return scaled(numbers, factors[:, :, None]).reshape(count, 256)


def dequantize_mxfp4(blocks: Bytes) -> Float32Array:
    """An exponent e (E8M0), 16 bytes: w = 2^(e - 128) TWICE_E2M1[q]; low nibbles are the first 16 of 32."""
    exponents = blocks[:, :1].astype(np.uint32)
    # The two smallest scales, 2^-128 and 2^-127, are subnormal.
    bits = np.where(exponents < 2, np.uint32(0x200000) << exponents, (exponents - 1) << np.uint32(23))
    return scaled(TWICE_E2M1[nibbles(blocks[:, 1:])], bits.astype(np.uint32).view(np.float32))
