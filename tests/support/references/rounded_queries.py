"""Queries in e4m3, as attention of prompts over a cache of e4m3 has them on sm_90a."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.formats.fp8 import E4M3_MAX, E4M3_VALUES, codes_of
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.tensor import Tensor, from_numpy

Array = np.ndarray[Any, Any]
LEAST_MAXIMUM = np.float32(1e-30)


def rounded_queries(q: Array, num_heads: int) -> Array:
    """q [T, Hq * D] as e4m3 times a scale for each head of a token, float64."""
    heads = q.astype(np.float32).reshape(len(q), num_heads, -1)
    largest = np.maximum(np.abs(heads).max(-1, keepdims=True), LEAST_MAXIMUM)
    codes = codes_of((heads * (E4M3_MAX / largest)).astype(np.float32))
    rounded: Array = E4M3_VALUES[codes].astype(np.float64) * (largest / E4M3_MAX)
    return rounded.reshape(q.shape)


class RoundedQueryOps(CpuOps):
    """Rounds all queries: also those of rows with one, which no kernel rounds."""

    def _paged_attention(
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, *settings: Any
    ) -> None:
        rounded = rounded_queries(q.numpy(), q.shape[1] // key_cache.shape[3]).astype(q.dtype)
        super()._paged_attention(from_numpy(rounded, self.device), key_cache, value_cache, metadata, *settings)
