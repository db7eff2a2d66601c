"""The format of cached keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class KVFormat:
    """Keys and values as elements of `dtype`, which may differ from the activations'; uint8 stands for e4m3."""

    dtype: np.dtype[Any]

    def nbytes(self, num_tokens: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of the keys of one layer; its values take as many."""
        return num_tokens * num_kv_heads * head_dim * self.dtype.itemsize
