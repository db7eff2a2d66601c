"""Weights from a GGUF file to the device, in the blocks that they are stored in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from tessera.engine.formats import (
    BLOCK_FORMATS,
    PACKED_FORMATS,
    DenseFormat,
    LinearWeight,
    WeightFormat,
    WeightPart,
)
from tessera.engine.models.weights.build import MatrixField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFTensor


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

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        stored = self._open(field, layer)
        columns = field.shared(self.partition.share(field.name, layer)).columns
        parts = tuple(
            self._part(format, list(group), columns)
            for format, group in itertools.groupby(stored, key=lambda entry: self._format_of(entry.tensor))
        )
        return LinearWeight(parts, self._bias(field, layer))

    def _open(self, field: MatrixField, layer: int | None) -> list[_Stored]:
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

    def _count_bytes(self) -> int:
        total = 0
        for field, layer in self._fields():
            if not isinstance(field, MatrixField):
                size = sum(piece.size for piece in self._pieces(field, "weight", layer))
                total += size * (1 + field.bias) * self.dtype.itemsize
                continue
            own = field.shared(self.partition.share(field.name, layer))
            total += own.bias * own.rows * self.dtype.itemsize
            total += sum(self._nbytes(entry.tensor) for entry in self._open(field, layer))
        return total

    def _nbytes(self, stored: GGUFTensor) -> int:
        format = self._format_of(stored)
        if isinstance(format, DenseFormat):
            return format.nbytes(*stored.shape)
        return stored.type.row_bytes(stored.shape[1]) * stored.shape[0]
