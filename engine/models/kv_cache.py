"""Keys and values of all cached tokens, in blocks, carved from one allocation."""

from __future__ import annotations

from tessera.engine.formats import KVFormat
from tessera.engine.models.config import ModelConfig
from tessera.engine.tensor import Device, Tensor


class KVCache:
    """Per layer one key and one value tensor [num_blocks, Hkv, block_size, D].

    `layers[i]` is (keys, values) of layer i. Contents are undefined until stored.

    Raises: OutOfMemoryError.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, format: KVFormat, device: Device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.nbytes = num_blocks * block_bytes(config, block_size, format)
        buffer = device.allocate(max(self.nbytes, 1))
        self.layers: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for layer in config.layers:
            spec = layer.attention
            shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
            keys = Tensor(buffer, shape, format.dtype, offset)
            values = Tensor(buffer, shape, format.dtype, offset + keys.nbytes)
            self.layers.append((keys, values))
            offset += keys.nbytes + values.nbytes

    @property
    def planes(self) -> list[Tensor]:
        """All of the tensors, in which a block has its parts."""
        return [tensor for pair in self.layers for tensor in pair]


def block_bytes(config: ModelConfig, block_size: int, format: KVFormat) -> int:
    """Bytes of one block over all layers, keys and values together."""
    specs = (layer.attention for layer in config.layers)
    return sum(2 * format.nbytes(block_size, spec.num_kv_heads, spec.head_dim) for spec in specs)
