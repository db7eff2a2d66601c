"""Weights from a quantised safetensors checkpoint to the device, in a format that the device multiplies."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from tessera.engine.formats import (
    DenseFormat,
    Fp8Format,
    LinearWeight,
    PackedGroupFormat,
    WeightFormat,
    WeightPart,
    packed_format,
)
from tessera.engine.formats.format import Array
from tessera.engine.models.quantised.shared import SharedMatrix
from tessera.engine.models.quantised.stored import StoredMatrix
from tessera.engine.models.weights.build import ExpertsField, MatrixField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.row_order import Piece, pieces_of
from tessera.engine.models.weights.stream import CHUNK_BYTES
from tessera.engine.tensor import from_numpy

logger = logging.getLogger("tessera.engine.models")


class _Part(NamedTuple):
    """A matrix of a fused weight, in the checkpoint and as it goes to the device."""

    piece: Piece
    matrix: StoredMatrix | None  # None: in 16 or 32 bits
    format: WeightFormat
    order: bytes


class QuantisedSource(CheckpointSource):
    """Parts of a fused weight may differ in their schemes; what no format of the device holds becomes dense."""

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        if isinstance(field, ExpertsField):
            return super().linear(field, layer)
        opened = self._open(field, layer)
        if not opened:
            return super().linear(field, layer)
        orders = {part.order for part in opened}
        order = None
        if len(orders) == 1 and not any(isinstance(part.format, DenseFormat) for part in opened):
            order = np.frombuffer(opened[0].order, np.int32) if opened[0].order else None
        else:
            opened = [part._replace(format=DenseFormat(self.dtype)) if part.order else part for part in opened]
        parts = tuple(self._part(group, field, layer) for group in _groups(opened))
        return LinearWeight(
            parts, self._bias(field, layer), None if order is None else from_numpy(order, self.ops.device)
        )

    def _open(self, field: MatrixField, layer: int | None) -> list[_Part]:
        """Nothing where the matrix is in 16 or 32 bits."""
        if isinstance(field, ExpertsField):
            return self._open_experts(field, layer)
        names = self._names(field, "weight", layer)
        if not any(isinstance(self.checkpoint.tensor(name), StoredMatrix) for name in names):
            return []
        if self._order(field, layer, names) is not None:  # rows of blocks cannot change their places
            return []
        columns = self.partition.share(field.name, layer).columns
        found = []
        for piece in self._pieces(field, "weight", layer):
            found.append(self._opened(piece, field, columns, self._format_of))
        return found

    def _opened(
        self, piece: Piece, field: MatrixField, columns: slice | None, format_of: Callable[[StoredMatrix], WeightFormat]
    ) -> _Part:
        """The rank's rows and `columns` of a matrix."""
        matrix = self.checkpoint.tensor(piece.name)
        if not isinstance(matrix, StoredMatrix):
            return _Part(piece, None, DenseFormat(self.dtype), b"")
        self._tensor(piece.name, (piece.height, field.columns))
        if piece.rows is not None or columns is not None:
            try:
                matrix = SharedMatrix(matrix, piece.rows, columns)
            except ValueError as error:
                raise self._not_shared(piece.name, error) from None
        order = b"" if matrix.order is None else matrix.order.tobytes()
        return _Part(piece, matrix, format_of(matrix), order)

    def _open_experts(self, field: ExpertsField, layer: int | None) -> list[_Part]:
        """Of each expert in turn; nothing where they are in 16 or 32 bits."""
        names, share = self._names(field, "weight", layer), self.partition.share(field.name, layer)
        if not any(isinstance(self.checkpoint.tensor(name), StoredMatrix) for name in names):
            super()._open(field, layer)
            return []
        count = len(names) // field.num_experts
        found = []
        for first in range(0, len(names), count):
            for piece in pieces_of(names[first : first + count], field.part_rows, None, share.rows):
                found.append(self._opened(piece, field, share.columns, self._format_in_mixture))
        return found

    def _format_in_mixture(self, matrix: StoredMatrix) -> WeightFormat:
        packed = packed_format(matrix.format, matrix.shape[1])
        return matrix.format if self.on_cpu else packed or DenseFormat(self.dtype)

    def _experts(self, field: ExpertsField, layer: int) -> LinearWeight:
        """One part, so that all matrices are in one format: dense where no format holds them all."""
        opened = self._open_experts(field, layer)
        format = self._format_of_experts(field, opened)
        if isinstance(format, DenseFormat):
            return super()._experts(field, layer)
        own = field.shared(self.partition.share(field.name, layer))
        made = WeightPart.empty(format, own.rows, own.columns, self.ops.device)
        start = 0
        for part in opened:
            assert part.matrix is not None
            self._send_matrix(part.matrix, made, start)
            start += part.piece.size
        return LinearWeight((made,))

    def _format_of_experts(self, field: ExpertsField, opened: list[_Part]) -> WeightFormat:
        """That of every expert's matrix, one below the other, in the order of their columns."""
        formats = {part.format for part in opened}
        if field.bias or not opened or any(part.matrix is None or part.order for part in opened):
            return DenseFormat(self.dtype)
        if len(formats) > 1:  # experts may differ in the scale of what they multiply, which then is not rounded
            formats = {
                replace(format, rounds_input=False, input_scale=None) if isinstance(format, Fp8Format) else format
                for format in formats
            }
        whole = all(part.piece.size % format.row_step == 0 for part in opened for format in formats)
        return formats.pop() if len(formats) == 1 and whole else DenseFormat(self.dtype)

    def _format_of(self, matrix: StoredMatrix) -> WeightFormat:
        """On the CPU its own, elsewhere that of kernels, dense where there are none."""
        if self.ops.device.name == "cpu" or self.ops.multiplies_stored(matrix.format, matrix.shape, self.dtype):
            return matrix.format
        packed = packed_format(matrix.format, matrix.shape[1])
        return DenseFormat(self.dtype) if packed is None else packed

    def _part(self, parts: list[_Part], field: MatrixField, layer: int | None) -> WeightPart:
        """The rows of these matrices one below the other."""
        share = self.partition.share(field.name, layer)
        rows = sum(part.piece.size for part in parts)
        made = WeightPart.empty(parts[0].format, rows, field.shared(share).columns, self.ops.device)
        start = 0
        for part in parts:
            stop = start + part.piece.size
            if isinstance(part.format, DenseFormat):
                target = made.tensors["values"][start:stop]
                self._fill(target, [part.piece], width=field.columns, columns=share.columns)
            else:
                assert part.matrix is not None
                self._send_matrix(part.matrix, made, start)
            start = stop
        return made

    def _send_matrix(self, matrix: StoredMatrix, part: WeightPart, first: int) -> None:
        """A matrix into the rows of a part from `first` on."""
        format = part.format
        columns = part.shape[1]
        step = max(CHUNK_BYTES // format.nbytes(1, columns) // format.row_step, 1) * format.row_step
        packed = format if isinstance(format, PackedGroupFormat) else None
        for start in range(0, matrix.shape[0], step):
            rows = slice(start, min(start + step, matrix.shape[0]))
            for name, tensor in part.tensors.items():
                share = 1 if tensor.shape[0] == part.shape[0] else format.row_step  # rows that a row of it is for
                target = tensor[(first + rows.start) // share : -(-(first + rows.stop) // share)]
                make = partial(_packed, matrix, packed, name, rows) if packed else partial(matrix.array, name, rows)
                self._stream.send(target, make)

    def _count_bytes(self) -> int:
        total = dense = stored = 0
        for field, layer in self._fields():
            if not isinstance(field, MatrixField):
                size = sum(piece.size for piece in self._pieces(field, "weight", layer))
                total += size * (1 + field.bias) * self.dtype.itemsize
                continue
            own = field.shared(self.partition.share(field.name, layer))
            total += own.bias * own.rows * self.dtype.itemsize
            opened = self._open(field, layer)
            if isinstance(field, ExpertsField):
                format = self._format_of_experts(field, opened)
                nbytes = format.nbytes(own.rows, own.columns)
                total += nbytes
                matrices = [part.matrix for part in opened if part.matrix is not None]
                if matrices and isinstance(format, DenseFormat):
                    dense += nbytes
                    stored += sum(matrix.format.nbytes(*matrix.shape) for matrix in matrices)
                continue
            total += sum(part.format.nbytes(part.piece.size, own.columns) for part in opened)
            if not opened:
                total += own.rows * own.columns * self.dtype.itemsize
        if dense:
            logger.warning(
                "%s: no product takes its experts as they are stored: they are dequantised to %s, which takes %.3g GB "
                "instead of %.3g GB",
                *(self.checkpoint.folder, self.dtype.name, dense / 1e9, stored / 1e9),
            )
        return total


def _packed(matrix: StoredMatrix, format: PackedGroupFormat, name: str, rows: slice) -> Array:
    return format.packed(name, matrix.format, lambda stored: matrix.array(stored, rows), rows, matrix.shape[1])


def _groups(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Neighbours that can be one part: of one format, and all but the last with whole steps of its rows."""
    for format, group in itertools.groupby(parts, key=lambda part: part.format):
        together: list[_Part] = []
        for part in group:
            if together and sum(other.piece.size for other in together) % format.row_step:
                yield together
                together = []
            together.append(part)
        yield together
