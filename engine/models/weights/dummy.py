"""Weights made up on the device, for speed measurements and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.engine.formats import (
    BLOCK_FORMATS,
    PACKED_FORMATS,
    LinearWeight,
    PackedGroupFormat,
    WeightFormat,
    WeightPart,
    packed_format,
)
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.offload.host_layers import HostLayers
from tessera.engine.models.partition import Partition, Rank, Share
from tessera.engine.models.quantised.rounded import ROUNDED, RoundedScheme
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.weights.build import (
    ExpertsField,
    MatrixField,
    NormField,
    Progress,
    VectorField,
    WeightSource,
    build_weights,
    num_weight_bytes,
)
from tessera.engine.models.weights.checkpoint_source import PROJECTIONS
from tessera.engine.models.weights.weights import NormWeights, Weights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float32

DUMMY_STD = 0.02
MXFP4_EXPONENT = 120  # 2^-7 times numbers up to 6
MXFP4_BLOCK_BYTES = 17
REPEATED_ROWS = 256


def dummy_weights(
    config: ModelConfig,
    dtype: np.dtype[Any],
    ops: Ops,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    host_layers: HostLayers | None = None,
    rank: Rank | None = None,
) -> Weights:
    """Equal for equal seeds: matrices are normal with deviation DUMMY_STD, norms are ones, biases zeros.

    `host_layers` takes some of the layers. What ranks share differs between them, what each has whole is equal.

    Raises: OutOfMemoryError.
    """
    source = DummySource(Partition(config, rank or Rank()), dtype, ops, seed, progress)
    weights = build_weights(config, source, host_layers)
    ops.device.synchronize()
    return weights


class DummySource(WeightSource):
    """See `dummy_weights`."""

    def __init__(
        self, partition: Partition, dtype: np.dtype[Any], ops: Ops, seed: int, progress: Progress | None
    ) -> None:
        config = partition.config
        self._partition = partition
        self._dtype = dtype
        self._ops = ops
        self._seed = seed
        rule = ARCHITECTURES[config.architecture].experts
        self._has_expert_modules = rule is not None and bool(rule.expert_modules)
        self._in_mxfp4 = config.mxfp4_experts
        self._progress = progress
        schemes = () if config.quantisation is None else config.quantisation.schemes
        self._rounding = next((scheme.name for scheme in schemes if isinstance(scheme, RoundedScheme)), None)
        self._total = num_weight_bytes(config, dtype)
        self._done = self._made = 0

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        share, had_bias = self._partition.share(field.name, layer), field.bias
        field = field.shared(share)
        bias = self._full(field.rows, 0) if field.bias else None
        if had_bias and bias is None:
            self._made += 1  # seeds go on as on the rank that has it
        if self._in_mxfp4 and isinstance(field, ExpertsField):
            return LinearWeight((self._mxfp4(field),), bias)
        format = self._quantised_format(field)
        if format is not None:
            return LinearWeight((self._quantised_part(field, format),), bias)
        values = empty((field.rows, field.columns), self._dtype, self._ops.device)
        self._ops.fill_normal(values, std=DUMMY_STD, seed=self._seed_of(share))
        return LinearWeight.of(self._counted(values), bias)

    def _seed_of(self, share: Share) -> int:
        own = 0 if share.rows is None and share.columns is None else self._partition.rank.index
        return ((self._seed << 20) + self._made + (own << 48)) % 2**64

    def _quantised_format(self, field: MatrixField) -> WeightFormat | None:
        """Of projections, where they are to be rounded while loading."""
        is_experts = isinstance(field, ExpertsField) and self._has_expert_modules
        if self._rounding is None or not (field.name in PROJECTIONS or is_experts) or field.columns % 2:
            return None
        stored = ROUNDED[self._rounding]
        as_stored = not is_experts and self._ops.multiplies_stored(stored, (field.rows, field.columns), self._dtype)
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
        size = self._size(field, layer)
        return NormWeights(self._full(size, 1), self._full(size, 0) if field.bias else None)

    def _mxfp4(self, field: ExpertsField) -> WeightPart:
        """Random numbers, all with the exponent that makes their deviation about DUMMY_STD."""
        on_cpu = self._ops.device.name == "cpu"
        formats: Mapping[str, WeightFormat] = BLOCK_FORMATS if on_cpu else PACKED_FORMATS
        part = WeightPart.empty(formats["MXFP4"], field.rows, field.columns, self._ops.device)
        for name, tensor in part.tensors.items():
            exponents = np.full(tensor.shape, np.iinfo(tensor.dtype).max // 0xFF * MXFP4_EXPONENT, tensor.dtype)
            if name == "headers":
                tensor.upload(exponents)
            elif name == "codes":
                bits = Tensor(tensor.buffer, tensor.shape, float32, tensor.offset)
                self._ops.fill_normal(bits, std=1.0, seed=((self._seed << 20) + self._made) % 2**64)
            else:
                blocks = np.random.default_rng(self._seed + self._made).integers(0, 256, tensor.shape, np.uint8)
                blocks.reshape(-1, MXFP4_BLOCK_BYTES)[:, 0] = MXFP4_EXPONENT
                tensor.upload(blocks)
            self._counted(tensor)
        return part

    def vector(self, field: VectorField, layer: int | None) -> Tensor:
        return self._full(self._size(field, layer), 0, float32 if field.float32 else self._dtype)

    def _size(self, field: NormField | VectorField, layer: int | None) -> int:
        rows = self._partition.share(field.name, layer).rows
        return field.size if rows is None else len(rows)

    def columns(self, field: MatrixField, columns: slice) -> LinearWeight:
        """As `CheckpointSource.columns`."""
        return self.linear(replace(field, columns=columns.stop - columns.start, bias=False), None)

    def settle(self) -> None:
        self._ops.device.synchronize()

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
