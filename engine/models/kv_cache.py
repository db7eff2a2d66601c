"""Keys and values of all cached tokens, in blocks, carved from one allocation."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.models.config import ModelConfig
from tessera.engine.tensor import Device, Tensor


class KVCache:
    """Per layer one key and one value tensor [num_blocks, Hkv, block_size, D].

    `layers[i]` is (keys, values) of layer i. Contents are undefined until stored.

    Raises: OutOfMemoryError.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: np.dtype[Any], device: Device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.nbytes = num_blocks * block_bytes(config, block_size, dtype)
        buffer = device.allocate(max(self.nbytes, 1))
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        tensor_bytes = self.nbytes // (2 * config.num_layers)
        tensors = [Tensor(buffer, shape, dtype, index * tensor_bytes) for index in range(2 * config.num_layers)]
        self.layers = list(zip(tensors[0::2], tensors[1::2], strict=True))


def block_bytes(config: ModelConfig, block_size: int, dtype: np.dtype[Any]) -> int:
    """Bytes of one block over all layers, keys and values together."""
    return 2 * config.num_layers * config.kv_size * block_size * dtype.itemsize
