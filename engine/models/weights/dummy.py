"""Weights made up on the device, for speed measurements and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight, PackedGroupFormat, WeightFormat, WeightPart, packed_format
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.quantised.rounded import ROUNDED, RoundedScheme
from tessera.engine.models.weights.build import (
    MatrixField,
    NormField,
    Progress,
    WeightSource,
    build_weights,
    num_weight_bytes,
)
from tessera.engine.models.weights.checkpoint_source import PROJECTIONS
from tessera.engine.models.weights.weights import NormWeights, Weights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty

DUMMY_STD = 0.02
REPEATED_ROWS = 256


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
        schemes = () if config.quantisation is None else config.quantisation.schemes
        self._rounding = next((scheme.name for scheme in schemes if isinstance(scheme, RoundedScheme)), None)
        self._total = num_weight_bytes(config, dtype)
        self._done = self._made = 0

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        bias = self._full(field.rows, 0) if field.bias else None
        format = self._quantised_format(field)
        if format is not None:
            return LinearWeight((self._quantised_part(field, format),), bias)
        values = empty((field.rows, field.columns), self._dtype, self._ops.device)
        self._ops.fill_normal(values, std=DUMMY_STD, seed=((self._seed << 20) + self._made) % 2**64)
        return LinearWeight.of(self._counted(values), bias)

    def _quantised_format(self, field: MatrixField) -> WeightFormat | None:
        """Of projections, where they are to be rounded while loading."""
        if self._rounding is None or field.name not in PROJECTIONS or field.columns % 2:
            return None
        stored = ROUNDED[self._rounding]
        as_stored = self._ops.multiplies_stored(stored, (field.rows, field.columns), self._dtype)
        if as_stored or self._ops.device.name == "cpu":
            return stored
        return packed_format(stored, field.columns)

    def _quantised_part(self, field: MatrixField, format: WeightFormat) -> WeightPart:
        """REPEATED_ROWS random rows, one below the other again and again."""
        assert self._rounding is not None
        stored, count = ROUNDED[self._rounding], min(REPEATED_ROWS, field.rows)
        random = np.random.default_rng((self._seed, self._made))
        arrays = stored.quantize(random.standard_normal((count, field.columns), np.float32) * np.float32(DUMMY_STD))
        if isinstance(format, PackedGroupFormat):
            rows = slice(0, count)
            arrays = {
                name: format.packed(name, stored, arrays.__getitem__, rows, field.columns)
                for name in format.tensor_names
            }
        part = WeightPart.empty(format, field.rows, field.columns, self._ops.device)
        for name, tensor in part.tensors.items():
            for start in range(0, field.rows, count):
                tensor[start : start + count].upload(arrays[name][: field.rows - start])
            self._counted(tensor)
        return part

    def norm(self, field: NormField, layer: int | None) -> NormWeights:
        return NormWeights(self._full(field.size, 1), self._full(field.size, 0) if field.bias else None)

    def _full(self, size: int, value: float) -> Tensor:
        vector = empty((size,), self._dtype, self._ops.device)
        vector.upload(np.full(size, value, self._dtype))
        return self._counted(vector)

    def _counted(self, tensor: Tensor) -> Tensor:
        self._made += 1
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor
