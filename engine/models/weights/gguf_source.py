"""Weights from a GGUF file to the device, in the blocks that they are stored in."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial

from tessera.engine.formats import (
    BLOCK_FORMATS,
    PACKED_FORMATS,
    DenseFormat,
    LinearWeight,
    PackedBlockFormat,
    WeightFormat,
    WeightPart,
)
from tessera.engine.models.weights.build import MatrixField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFTensor
from tessera.engine.models.weights.stream import CHUNK_BYTES
from tessera.engine.tensor import Tensor, empty, uint8

STAGED_BYTES = 4 * CHUNK_BYTES  # of blocks that wait on the device to be packed
MOST_STAGED = 2


class GGUFSource(CheckpointSource):
    """Parts of a fused weight may be stored in types that differ; vectors, and plain matrices, get the dtype asked for.

    On the CPU blocks stay as they are stored; elsewhere the device packs them for its kernels.
    """

    described_by = "the metadata"
    refuses_others = True

    @cached_property
    def _staged(self) -> deque[tuple[Tensor, Callable[[], None]]]:
        """Memory, and the packing of what lies in it."""
        return deque()

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
            if isinstance(format, PackedBlockFormat):
                self._pack_blocks(self._gguf_tensor(name, (rows, columns)), part, start)
            else:
                (target,) = part.tensors.values()
                place = target[start : start + rows]
                if isinstance(format, DenseFormat):
                    self._read_part(name, place, stored_transposed=False)
                else:
                    self._send_blocks(self._gguf_tensor(name, (rows, columns)), slice(0, rows), place)
            start += rows
        return part

    def _send_blocks(self, stored: GGUFTensor, rows: slice, target: Tensor) -> None:
        """These rows of a matrix as they are stored."""
        step = max(CHUNK_BYTES // target.shape[1], 1)
        for start in range(0, target.shape[0], step):
            end = min(start + step, target.shape[0])
            self._stream.send(target[start:end], partial(stored.blocks, slice(rows.start + start, rows.start + end)))

    def _pack_blocks(self, stored: GGUFTensor, part: WeightPart, first: int) -> None:
        """A matrix into the rows of a part from `first` on, by way of memory in which the device packs it."""
        row_bytes = stored.type.row_bytes(stored.shape[1])
        step = max(STAGED_BYTES // row_bytes, 1)
        for start in range(0, stored.shape[0], step):
            rows = slice(start, min(start + step, stored.shape[0]))
            memory = self._staging_memory(row_bytes)
            blocks = Tensor(memory.buffer, (rows.stop - rows.start, row_bytes), uint8, memory.offset)
            pack = partial(self.ops.pack_blocks, blocks, part, first + start)
            self._send_blocks(stored, rows, blocks)
            self._stream.call_after(pack)
            self._staged.append((memory, pack))

    def _staging_memory(self, row_bytes: int) -> Tensor:
        """Memory for stored rows: new, or once enough is in use the piece whose packing began first."""
        if len(self._staged) < MOST_STAGED:
            return empty((max(STAGED_BYTES, row_bytes),), uint8, self.ops.device)
        memory, pack = self._staged.popleft()
        self._stream.wait_for(pack)
        return memory if memory.nbytes >= row_bytes else empty((row_bytes,), uint8, self.ops.device)

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
