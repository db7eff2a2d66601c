"""Stored blocks to float32, and the types of 32 elements.

Layouts as ggml defines them (ggml-common.h and the dequantising rows of ggml-quants.c). Every operation is one of
float32 in the order written here, so that results equal the reference's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tessera.engine.gguf.block_parts import Array, Bytes, Float32Array, half_at, nibbles, scaled
from tessera.engine.gguf.k_blocks import (
    dequantize_q2_k,
    dequantize_q3_k,
    dequantize_q4_k,
    dequantize_q5_k,
    dequantize_q6_k,
)
from tessera.engine.gguf.table_blocks import dequantize_iq4_nl, dequantize_iq4_xs, dequantize_mxfp4
from tessera.engine.gguf.tensor_types import TensorType

PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@np.errstate(all="ignore")
def dequantize(stored: Bytes, type: TensorType) -> Float32Array:
    """Rows as they are stored, [R, bytes of a row] uint8, in float32 [R, K]."""
    rows = len(stored)
    if type.name in PLAIN:
        return np.ascontiguousarray(stored).view(PLAIN[type.name]).astype(np.float32)
    blocks = stored.reshape(-1, type.block_bytes)
    return BLOCKS[type.name](blocks).reshape(rows, -1)


def plain_values(stored: Bytes, type: TensorType) -> Array:
    """Rows of F32, F16 or BF16 as they are, [R, K]; a view where the bytes lie one after the other."""
    return np.ascontiguousarray(stored).view(PLAIN[type.name])


# -- blocks of 32: [n, bytes] uint8 -> [n, 32] ----------------------------------------------------


def _dequantize_q4_0(blocks: Bytes) -> Float32Array:
    """d f16, 16 bytes of two numbers: w = d (q - 8); low nibbles are the first 16."""
    return scaled(nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), half_at(blocks, 0))


def _dequantize_q4_1(blocks: Bytes) -> Float32Array:
    """d f16, m f16, 16 bytes: w = d q + m."""
    return scaled(nibbles(blocks[:, 4:]), half_at(blocks, 0)) + half_at(blocks, 2)


def _dequantize_q5_0(blocks: Bytes) -> Float32Array:
    """d f16, 32 fifth bits, 16 bytes: w = d (q - 16)."""
    return scaled(_five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16), half_at(blocks, 0))


def _dequantize_q5_1(blocks: Bytes) -> Float32Array:
    """d f16, m f16, 32 fifth bits, 16 bytes: w = d q + m."""
    return scaled(_five_bits(blocks[:, 4:8], blocks[:, 8:]), half_at(blocks, 0)) + half_at(blocks, 2)


def _dequantize_q8_0(blocks: Bytes) -> Float32Array:
    """d f16, 32 int8: w = d q."""
    return scaled(blocks[:, 2:].view(np.int8), half_at(blocks, 0))


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    result = nibbles(low)
    result |= fifth << np.uint8(4)
    return result


BLOCKS: dict[str, Callable[[Bytes], Float32Array]] = {
    "Q4_0": _dequantize_q4_0,
    "Q4_1": _dequantize_q4_1,
    "Q5_0": _dequantize_q5_0,
    "Q5_1": _dequantize_q5_1,
    "Q8_0": _dequantize_q8_0,
    "Q2_K": dequantize_q2_k,
    "Q3_K": dequantize_q3_k,
    "Q4_K": dequantize_q4_k,
    "Q5_K": dequantize_q5_k,
    "Q6_K": dequantize_q6_k,
    "IQ4_NL": dequantize_iq4_nl,
    "IQ4_XS": dequantize_iq4_xs,
    "MXFP4": dequantize_mxfp4,
}
