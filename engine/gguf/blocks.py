"""Stored blocks to float32.

A block holds integers of a few bits, q, and scales for groups of its elements: w = factor * value(q) + offset, where
the value is q less a constant or chosen from a table. Every operation is one of float32 in that order, so that
results equal those of ggml-quants.c bit for bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tessera.engine.gguf.block_parts import Array, Bytes, Float32Array
from tessera.engine.gguf.headers import SCALES, header_of
from tessera.engine.gguf.numbers import NUMBERS
from tessera.engine.gguf.tensor_types import TensorType

PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# What is subtracted from q; Q8_0 stores signed numbers.
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}
# Values of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of E2M1 (Open Compute Project, Microscaling Formats 1.0, table 5).
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLES = {"IQ4_NL": NONLINEAR, "IQ4_XS": NONLINEAR, "MXFP4": TWICE_E2M1}


def dequantize(stored: Bytes, type: TensorType) -> Float32Array:
    """Rows as they are stored, [R, bytes of a row] uint8, in float32 [R, K]."""
    rows = len(stored)
    if type.name in PLAIN:
        return np.ascontiguousarray(stored).view(PLAIN[type.name]).astype(np.float32)
    blocks = stored.reshape(-1, type.block_bytes)
    return weights_of(NUMBERS[type.name](blocks), header_of(blocks, type.name), type.name).reshape(rows, -1)


@np.errstate(all="ignore")
def weights_of(numbers: Bytes, header: Bytes, name: str) -> Float32Array:
    """The weights of blocks: q [n, elements] and headers [n, bytes] -> [n, elements]."""
    factors, offsets = SCALES[name](header)
    result: Float32Array = _values(numbers, name).astype(np.float32)
    groups = result.reshape(*factors.shape, -1)
    groups *= factors[:, :, None]
    if offsets is not None:
        groups += offsets[:, :, None]
    return result


def _values(numbers: Bytes, name: str) -> Array:
    if name in TABLES:
        return np.array(TABLES[name], np.int8)[numbers]
    if name == "Q8_0":
        return numbers.view(np.int8)
    return numbers.view(np.int8) - np.int8(ZEROS[name]) if name in ZEROS else numbers


def plain_values(stored: Bytes, type: TensorType) -> Array:
    """Rows of F32, F16 or BF16 as they are, [R, K]; a view where the bytes lie one after the other."""
    return np.ascontiguousarray(stored).view(PLAIN[type.name])
