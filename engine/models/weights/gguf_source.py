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
from tessera.engine.models.weights.build import ExpertsField, MatrixField, VectorField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFTensor, StackedExperts
from tessera.engine.models.weights.row_order import pieces_of
from tessera.engine.tensor import empty

logger = logging.getLogger("tessera.engine.models")


class _Stored(NamedTuple):
    """A tensor of a fused weight, with the rank's rows in order and its columns."""

    name: str
    tensor: GGUFTensor


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
        stored = self._open(field, layer)
        columns = field.shared(self.partition.share(field.name, layer)).columns
        parts = tuple(
            self._part(format, list(group), columns)
            for format, group in itertools.groupby(stored, key=lambda entry: self._format_of(entry.tensor))
        )
        return LinearWeight(parts, self._bias(field, layer))

    def _open(self, field: MatrixField, layer: int | None) -> list[_Stored]:
        if isinstance(field, ExpertsField):
            return [_Stored(*entry) for entry in self._open_experts(field, layer)]
        columns = self.partition.share(field.name, layer).columns
        found = []
        for piece in self._pieces(field, "weight", layer):
            tensor = self._chosen(self._tensor(piece.name, (piece.height, field.columns)), piece, columns)
            assert isinstance(tensor, GGUFTensor)
            found.append(_Stored(piece.name, tensor))
        return found

    def _part(self, format: WeightFormat, stored: list[_Stored], columns: int) -> WeightPart:
        """The rows of these tensors one below the other."""
        part = WeightPart.empty(format, sum(entry.tensor.shape[0] for entry in stored), columns, self.ops.device)
        start = 0
        for name, tensor in stored:
            rows = tensor.shape[0]
            if isinstance(format, DenseFormat):
                self.send_rows(tensor, part.tensors["values"][start : start + rows], name)
            else:
                self.block_upload.send(tensor, slice(0, rows), part, start)
            start += rows
        return part

    def _format_of(self, stored: GGUFTensor) -> WeightFormat:
        dense = DenseFormat(self.dtype)
        formats: Mapping[str, WeightFormat] = BLOCK_FORMATS if self.ops.device.name == "cpu" else PACKED_FORMATS
        format = formats.get(stored.type.name)
        return format if format is not None and (format.on_cuda or self.ops.device.name == "cpu") else dense

    def _experts(self, field: ExpertsField, layer: int) -> LinearWeight:
        """One part, so that all matrices are in one format: blocks where they are stored in the same, else numbers."""
        share = self.partition.share(field.name, layer)
        opened, own = self._open_experts(field, layer), field.shared(share)
        format = self._format_of_all([tensor for _, tensor in opened])
        if not isinstance(format, DenseFormat):
            part = self.send_blocks(StackedExperts([tensor for _, tensor in opened]), format)
        else:
            part = WeightPart.empty(format, own.rows, own.columns, self.ops.device)
            row = 0
            for expert in range(field.num_experts):
                for name, tensor in opened:
                    count = tensor.shape[1]
                    self.send_rows(tensor.of_expert(expert), part.tensors["values"][row : row + count], name)
                    row += count
        bias = None
        if own.bias:
            bias = empty((own.rows,), self.dtype, self.ops.device)
            ExpertReader(self, field, layer, share).read_bias(bias)
        return LinearWeight((part,), bias)

    def _open_experts(self, field: ExpertsField, layer: int | None) -> list[tuple[str, GGUFTensor]]:
        """Names of tensors, and what the rank has of them. Raises: ModelError where blocks would be taken apart."""
        assert layer is not None, "experts are in layers"
        share = self.partition.share(field.name, layer)
        names = ExpertReader(self, field, layer).names("weight")
        found = []
        for piece in pieces_of(names, field.part_rows, None, share.rows):
            stored = self._tensor(piece.name, (field.num_experts, piece.height, field.columns))
            assert isinstance(stored, GGUFTensor)
            try:
                found.append((piece.name, stored.chosen_of_experts(piece.rows, share.columns)))
            except ValueError as error:
                raise self._not_shared(piece.name, error) from None
        return found

    def _format_of_all(self, tensors: list[GGUFTensor]) -> WeightFormat:
        formats = {self._format_of(tensor) for tensor in tensors}
        return formats.pop() if len(formats) == 1 else DenseFormat(self.dtype)

    def _count_bytes(self) -> int:
        total = mixed = dense = stored = 0
        for field, layer in self._fields():
            if not isinstance(field, MatrixField):
                itemsize = 4 if isinstance(field, VectorField) and field.float32 else self.dtype.itemsize
                size = sum(piece.size for piece in self._pieces(field, "weight", layer))
                total += size * (1 + field.bias) * itemsize
                continue
            own = field.shared(self.partition.share(field.name, layer))
            total += own.bias * own.rows * self.dtype.itemsize
            if not isinstance(field, ExpertsField):
                total += sum(
                    self._nbytes(entry.tensor, self._format_of(entry.tensor)) for entry in self._open(field, layer)
                )
                continue
            tensors = [tensor for _, tensor in self._open_experts(field, layer)]
            format = self._format_of_all(tensors)
            kept = sum(self._nbytes(tensor, format) for tensor in tensors)
            total += kept
            if len({self._format_of(tensor) for tensor in tensors}) > 1:
                mixed += 1
                dense += kept
                stored += sum(self._nbytes(tensor, self._format_of(tensor)) for tensor in tensors)
        if mixed:
            logger.warning(
                "%s: gate and up of the experts of %d layers are stored in two types: they are kept in %s, which takes "
                "%.3g GB instead of %.3g GB",
                *(self.checkpoint.folder, mixed, self.dtype.name, dense / 1e9, stored / 1e9),
            )
        return total

    def _nbytes(self, stored: GGUFTensor, format: WeightFormat) -> int:
        """Of a tensor as it is kept."""
        rows, columns = math.prod(stored.shape[:-1]), stored.shape[-1]
        return (
            format.nbytes(rows, columns) if isinstance(format, DenseFormat) else stored.type.row_bytes(columns) * rows
        )
