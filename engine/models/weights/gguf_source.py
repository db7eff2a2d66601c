"""Weights from a GGUF file to the device, in the blocks that they are stored in."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from tessera.engine.formats import (
    BLOCK_FORMATS,
    PACKED_FORMATS,
    DenseFormat,
    LinearWeight,
    WeightFormat,
    WeightPart,
)
from tessera.engine.models.gguf.mixtures import GGUF_EXPERTS
from tessera.engine.models.mixture.stored import ExpertReader
from tessera.engine.models.registry.experts import ExpertForm
from tessera.engine.models.specs import MoESpec
from tessera.engine.models.weights.build import ExpertsField, MatrixField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFTensor, StackedExperts
from tessera.engine.models.weights.row_order import Rows
from tessera.engine.tensor import empty

CORRECTION = "e_score_correction_bias"  # of routers, in float32 whatever the dtype

logger = logging.getLogger("tessera.engine.models")


class _Stored(NamedTuple):
    """A tensor of a fused weight, with its rows in `order` already."""

    name: str
    tensor: GGUFTensor
    order: Rows | None


class GGUFSource(CheckpointSource):
    """Parts of a fused weight may be stored in types that differ; vectors, and plain matrices, get the dtype asked for.

    On the CPU blocks stay as they are stored; elsewhere the device packs them for its kernels.
    """

    described_by = "the metadata"
    refuses_others = True
    as_published = False

    @cached_property
    def expert_form(self) -> ExpertForm:
        return GGUF_EXPERTS

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        if isinstance(field, ExpertsField):
            assert layer is not None, "experts are in layers"
            return self._experts(field, layer)
        names = self._names(field, "weight", layer)
        part_rows = (field.rows,) if len(names) == 1 else field.part_rows
        order = self._order(field, layer, names)
        stored: list[_Stored] = []
        start = 0
        for name, rows in zip(names, part_rows, strict=True):
            part_order = None if order is None else order[start : start + rows] - start
            stored.append(_Stored(name, self._gguf_tensor(name, (rows, field.columns), part_order), part_order))
            start += rows
        parts = tuple(
            self._part(format, list(group), field.columns)
            for format, group in itertools.groupby(stored, key=lambda entry: self._format_of(entry.tensor))
        )
        return LinearWeight(parts, self._bias(field, layer))

    def _part(self, format: WeightFormat, stored: list[_Stored], columns: int) -> WeightPart:
        """The rows of these tensors one below the other."""
        part = WeightPart.empty(format, sum(entry.tensor.shape[0] for entry in stored), columns, self.ops.device)
        start = 0
        for name, tensor, order in stored:
            rows = tensor.shape[0]
            if isinstance(format, DenseFormat):
                self._read_part(name, part.tensors["values"][start : start + rows], order)
            else:
                self.block_upload.send(tensor, slice(0, rows), part, start)
            start += rows
        return part

    def _gguf_tensor(self, name: str, expected: tuple[int, ...], order: Rows | None) -> GGUFTensor:
        stored = self._tensor(name, expected, order)
        assert isinstance(stored, GGUFTensor)
        return stored

    def _format_of(self, stored: GGUFTensor) -> WeightFormat:
        dense = DenseFormat(self.dtype)
        formats: Mapping[str, WeightFormat] = BLOCK_FORMATS if self.ops.device.name == "cpu" else PACKED_FORMATS
        format = formats.get(stored.type.name)
        return format if format is not None and (format.on_cuda or self.ops.device.name == "cpu") else dense

    def _experts(self, field: ExpertsField, layer: int) -> LinearWeight:
        """One part, so that all matrices are in one format: blocks where they are stored in the same, else numbers."""
        reader = ExpertReader(self, field, layer)
        names = reader.names("weight")
        counts = field.part_rows if len(names) > 1 else (field.expert_rows,)
        tensors = [
            self._gguf_tensor(name, (field.num_experts, rows, field.columns), None)
            for name, rows in zip(names, counts, strict=True)
        ]
        format = self._format_of_all(tensors)
        if not isinstance(format, DenseFormat):
            part = self.send_blocks(StackedExperts(tensors), format)
        else:
            part = WeightPart.empty(format, field.rows, field.columns, self.ops.device)
            row = 0
            for expert in range(field.num_experts):
                for name, tensor, count in zip(names, tensors, counts, strict=True):
                    self.send_rows(tensor.of_expert(expert), part.tensors["values"][row : row + count], name)
                    row += count
        bias = None
        if field.bias:
            bias = empty((field.rows,), self.dtype, self.ops.device)
            reader.read_bias(bias)
        return LinearWeight((part,), bias)

    def _format_of_all(self, tensors: list[GGUFTensor]) -> WeightFormat:
        formats = {self._format_of(tensor) for tensor in tensors}
        return formats.pop() if len(formats) == 1 else DenseFormat(self.dtype)

    def _count_bytes(self) -> int:
        total = sum(self._bytes_of(name) for name in set(self._all_names()))
        mixed = dense = stored = 0
        for layer, spec in enumerate(self.config.layers):
            if not isinstance(spec.mlp, MoESpec):
                continue
            names = [self.spelt(name.format(i=layer)) for name in self.expert_form.up]
            tensors = [tensor for tensor in map(self.checkpoint.tensor, names) if isinstance(tensor, GGUFTensor)]
            if len({self._format_of(tensor) for tensor in tensors}) > 1:
                mixed += 1
                dense += sum(math.prod(tensor.shape) * self.dtype.itemsize for tensor in tensors)
                stored += sum(map(self._bytes_of, names))
        if mixed:
            logger.warning(
                "%s: gate and up of the experts of %d layers are stored in two types: they are kept in %s, which takes "
                "%.3g GB instead of %.3g GB",
                *(self.checkpoint.folder, mixed, self.dtype.name, dense / 1e9, stored / 1e9),
            )
        return total + dense - stored

    def _bytes_of(self, name: str) -> int:
        """Of a tensor as it is kept."""
        stored = self.checkpoint.tensor(name)
        assert isinstance(stored, GGUFTensor)
        if len(stored.shape) == 1:
            return stored.shape[0] * (4 if name.endswith(CORRECTION) else self.dtype.itemsize)
        rows, columns = math.prod(stored.shape[:-1]), stored.shape[-1]
        format = self._format_of(stored)
        return (
            format.nbytes(rows, columns) if isinstance(format, DenseFormat) else stored.type.row_bytes(columns) * rows
        )
