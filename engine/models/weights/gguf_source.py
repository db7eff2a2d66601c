"""Weights from a GGUF file to the device, in the blocks that they are stored in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

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


class GGUFSource(CheckpointSource):
    """Parts of a fused weight may be stored in types that differ; vectors, and plain matrices, get the dtype asked for.

    On the CPU blocks stay as they are stored; elsewhere the device packs them for its kernels.
    """

    described_by = "the metadata"
    refuses_others = True

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        names = self._names(field, "weight", layer)
        part_rows = (field.rows,) if len(names) == 1 else field.part_rows
        stored = [
            (name, rows, self._format_of(self._gguf_tensor(name, (rows, field.columns))))
            for name, rows in zip(names, part_rows, strict=True)
        ]
        parts = tuple(
            self._part(format, [(name, rows) for name, rows, _ in group], field.columns)
            for format, group in itertools.groupby(stored, key=lambda entry: entry[2])
        )
        bias = self._vector(self._names(field, "bias", layer), field.part_rows) if field.bias else None
        return LinearWeight(parts, bias)

    def _part(self, format: WeightFormat, stored: list[tuple[str, int]], columns: int) -> WeightPart:
        """The rows of these tensors one below the other."""
        part = WeightPart.empty(format, sum(rows for _, rows in stored), columns, self.ops.device)
        start = 0
        for name, rows in stored:
            if isinstance(format, DenseFormat):
                self._read_part(name, part.tensors["values"][start : start + rows], stored_transposed=False)
            else:
                self.block_upload.send(self._gguf_tensor(name, (rows, columns)), slice(0, rows), part, start)
            start += rows
        return part

    def _gguf_tensor(self, name: str, expected: tuple[int, ...]) -> GGUFTensor:
        stored = self._tensor(name, expected)
        assert isinstance(stored, GGUFTensor)
        return stored

    def _format_of(self, stored: GGUFTensor) -> WeightFormat:
        dense = DenseFormat(self.dtype)
        formats: Mapping[str, WeightFormat] = BLOCK_FORMATS if self.ops.device.name == "cpu" else PACKED_FORMATS
        format = formats.get(stored.type.name)
        return format if format is not None and (format.on_cuda or self.ops.device.name == "cpu") else dense

    def _count_bytes(self) -> int:
        total = 0
        for name in set(self._all_names()):
            stored = self.checkpoint.tensor(name)
            assert isinstance(stored, GGUFTensor)
            if len(stored.shape) == 2:
                format = self._format_of(stored)
                stays = not isinstance(format, DenseFormat)
                total += (
                    stored.type.row_bytes(stored.shape[1]) * stored.shape[0] if stays else format.nbytes(*stored.shape)
                )
            else:
                total += stored.shape[0] * self.dtype.itemsize
        return total
