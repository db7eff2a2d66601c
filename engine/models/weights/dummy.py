"""Weights made up on the device, for speed measurements and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.weights.build import (
    MatrixField,
    NormField,
    Progress,
    VectorField,
    WeightSource,
    build_weights,
    num_weight_bytes,
)
from tessera.engine.models.weights.weights import NormWeights, Weights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float32

DUMMY_STD = 0.02


def dummy_weights(
    config: ModelConfig, dtype: np.dtype[Any], ops: Ops, *, seed: int = 0, progress: Progress | None = None
) -> Weights:
    """Equal for equal seeds: matrices are normal with deviation DUMMY_STD, norms are ones, biases zeros.

    Raises: OutOfMemoryError.
    """
    weights = build_weights(config, _DummySource(config, dtype, ops, seed, progress))
    ops.device.synchronize()
    return weights


class _DummySource(WeightSource):
    def __init__(
        self, config: ModelConfig, dtype: np.dtype[Any], ops: Ops, seed: int, progress: Progress | None
    ) -> None:
        self._dtype = dtype
        self._ops = ops
        self._seed = seed
        self._progress = progress
        self._total = num_weight_bytes(config, dtype)
        self._done = self._made = 0

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        values = empty((field.rows, field.columns), self._dtype, self._ops.device)
        self._ops.fill_normal(values, std=DUMMY_STD, seed=((self._seed << 20) + self._made) % 2**64)
        return LinearWeight.of(self._counted(values), self._full(field.rows, 0) if field.bias else None)

    def norm(self, field: NormField, layer: int | None) -> NormWeights:
        return NormWeights(self._full(field.size, 1), self._full(field.size, 0) if field.bias else None)

    def vector(self, field: VectorField, layer: int | None) -> Tensor:
        return self._full(field.size, 0, float32 if field.float32 else self._dtype)

    def _full(self, size: int, value: float, dtype: np.dtype[Any] | None = None) -> Tensor:
        dtype = dtype or self._dtype
        vector = empty((size,), dtype, self._ops.device)
        vector.upload(np.full(size, value, dtype))
        return self._counted(vector)

    def _counted(self, tensor: Tensor) -> Tensor:
        self._made += 1
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor
