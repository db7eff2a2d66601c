"""Pieces that several block types are made of: half-precision scales, nibbles, two-bit fields."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from tessera.engine.gguf.tensor_types import TensorType

Array: TypeAlias = np.ndarray[Any, Any]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


def half_at(blocks: Bytes, start: int) -> Float32Array:
    """The float16 at byte `start` of every block, [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def scaled(numbers: Array, scales: Float32Array) -> Float32Array:
    """numbers * scales in float32, in the memory of one result."""
    result: Float32Array = numbers.astype(np.float32)
    result *= scales
    return result


def nibbles(packed: Bytes) -> Bytes:
    """[n, m] -> [n, 2 m]: all low halves, then all high ones."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=1)


def grouped_nibbles(packed: Bytes, width: int) -> Bytes:
    """[n, m] -> [n, m / width, 2, width]: of every `width` bytes the low halves, then the high ones."""
    groups = packed.reshape(len(packed), -1, width)
    return np.stack((groups & np.uint8(15), groups >> np.uint8(4)), axis=2)


def pairs_of_bits(packed: Bytes, width: int) -> Bytes:
    """[n, m] -> [n, m / width, 4, width]: of every `width` bytes the lowest two bits, the next two, and so on."""
    groups = packed.reshape(len(packed), -1, 1, width)
    return groups >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)


class BlockRows(Protocol):
    """A stored matrix [rows, columns], or several of one width on top of each other."""

    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]: ...

    def blocks(self, rows: slice) -> Bytes:
        """Of these rows, [n, bytes of a row] uint8."""
