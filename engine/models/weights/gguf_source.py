"""Weights from a GGUF file to the device, in the blocks that they are stored in."""

from __future__ import annotations

import itertools
from functools import partial

from tessera.engine.formats import BLOCK_FORMATS, DenseFormat, LinearWeight, WeightFormat, WeightPart
from tessera.engine.models.weights.build import MatrixField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFTensor
from tessera.engine.models.weights.stream import CHUNK_BYTES
from tessera.engine.tensor import Tensor


class GGUFSource(CheckpointSource):
    """Parts of a fused weight may be stored in types that differ; vectors, and plain matrices, get the dtype asked for.

    So do blocks for which the device has no kernels.
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
        (target,) = part.tensors.values()
        start = 0
        for name, rows in stored:
            place = target[start : start + rows]
            if isinstance(format, DenseFormat):
                self._read_part(name, place, stored_transposed=False)
            else:
                self._send_blocks(self._gguf_tensor(name, (rows, columns)), place)
            start += rows
        return part

    def _send_blocks(self, stored: GGUFTensor, target: Tensor) -> None:
        step = max(CHUNK_BYTES // target.shape[1], 1)
        for start in range(0, target.shape[0], step):
            rows = slice(start, min(start + step, target.shape[0]))
            self._stream.send(target[rows], partial(stored.blocks, rows))

    def _gguf_tensor(self, name: str, expected: tuple[int, ...]) -> GGUFTensor:
        stored = self._tensor(name, expected)
        assert isinstance(stored, GGUFTensor)
        return stored

    def _format_of(self, stored: GGUFTensor) -> WeightFormat:
        format = BLOCK_FORMATS.get(stored.type.name)
        usable = format is not None and (format.on_cuda or self.ops.device.name == "cpu")
        return format if format is not None and usable else DenseFormat(self.dtype)

    def _count_bytes(self) -> int:
        total = 0
        for name in set(self._all_names()):
            stored = self.checkpoint.tensor(name)
            assert isinstance(stored, GGUFTensor)
            if len(stored.shape) == 2:
                total += self._format_of(stored).nbytes(*stored.shape)
            else:
                total += stored.shape[0] * self.dtype.itemsize
        return total
