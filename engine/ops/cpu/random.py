"""Normal random numbers on the CPU."""

from __future__ import annotations

import math

import numpy as np

from tessera.engine.ops.cpu.philox import key_of_seed, philox4x32_10
from tessera.engine.ops.cpu.precision import Float32Array, rounded
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

# Philox blocks of four numbers that are made at a time.
NORMAL_BLOCKS = 1 << 16


class RandomOps(Ops):
    def _fill_normal(self, out: Tensor, mean: float, std: float, seed: int) -> None:
        flat = out.numpy().reshape(-1)
        key = key_of_seed(seed & 0xFFFFFFFFFFFFFFFF)
        for first in range(0, -(-flat.size // 4), NORMAL_BLOCKS):
            part = flat[first * 4 : (first + NORMAL_BLOCKS) * 4]
            normal = _normal_blocks(first, -(-part.size // 4), key)[: part.size]
            normal *= np.float32(std)
            normal += np.float32(mean)
            part[...] = rounded(normal, out.dtype)


def _normal_blocks(first: int, count: int, key: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Float32Array:
    """[count * 4] normal numbers of Philox blocks `first` and on (Box and Muller 1958)."""
    block = np.arange(first, first + count, dtype=np.uint64)
    counter = np.zeros((count, 4), np.uint32)
    counter[:, 0] = block & np.uint64(0xFFFFFFFF)
    counter[:, 1] = block >> np.uint64(32)
    bits = philox4x32_10(counter, key) >> np.uint32(8)
    unit = np.float32(2**-24)
    radius = np.sqrt(-2 * np.log((bits[:, 0::2] + np.uint32(1)).astype(np.float32) * unit))
    angle = bits[:, 1::2].astype(np.float32) * np.float32(2 * math.pi * 2**-24)
    normal = np.empty((count, 4), np.float32)
    np.multiply(radius, np.cos(angle), out=normal[:, 0::2])
    np.multiply(radius, np.sin(angle), out=normal[:, 1::2])
    return normal.reshape(-1)
