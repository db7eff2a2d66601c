"""Weights from a quantised safetensors checkpoint to the device, in a format that the device multiplies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from tessera.engine.formats import (
    DenseFormat,
    LinearWeight,
    PackedGroupFormat,
    WeightFormat,
    WeightPart,
    packed_format,
)
from tessera.engine.formats.format import Array
from tessera.engine.models.quantised.stored import StoredMatrix
from tessera.engine.models.weights.build import MatrixField
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.stream import CHUNK_BYTES
from tessera.engine.tensor import from_numpy


class _Piece(NamedTuple):
    """A matrix of a fused weight, in the checkpoint and as it goes to the device."""

    name: str
    rows: int
    format: WeightFormat
    order: bytes


class QuantisedSource(CheckpointSource):
    """Parts of a fused weight may differ in their schemes; what no format of the device holds becomes dense."""

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        names = self._names(field, "weight", layer)
        matrices = [self.checkpoint.tensor(name) for name in names]
        if not any(isinstance(matrix, StoredMatrix) for matrix in matrices):
            return super().linear(field, layer)
        part_rows = (field.rows,) if len(names) == 1 else field.part_rows
        pieces = [self._piece(field, name, rows) for name, rows in zip(names, part_rows, strict=True)]
        orders = {piece.order for piece in pieces}
        order = np.frombuffer(orders.pop(), np.int32) if len(orders) == 1 and orders != {b""} else None
        if order is None:
            pieces = [piece._replace(format=DenseFormat(self.dtype)) if piece.order else piece for piece in pieces]
        parts = tuple(self._part(group, field.columns) for group in _groups(pieces))
        bias = self._vector(self._names(field, "bias", layer), field.part_rows) if field.bias else None
        return LinearWeight(parts, bias, None if order is None else from_numpy(order, self.ops.device))

    def _piece(self, field: MatrixField, name: str, rows: int) -> _Piece:
        matrix = self.checkpoint.tensor(name)
        if isinstance(matrix, StoredMatrix):
            self._tensor(name, (rows, field.columns))
            order = b"" if matrix.order is None else matrix.order.tobytes()
            return _Piece(name, rows, self._format_of(matrix), order)
        return _Piece(name, rows, DenseFormat(self.dtype), b"")

    def _format_of(self, matrix: StoredMatrix) -> WeightFormat:
        """On the CPU its own, elsewhere that of kernels, dense where there are none."""
        if self.ops.device.name == "cpu" or self.ops.multiplies_stored(matrix.format, matrix.shape, self.dtype):
            return matrix.format
        packed = packed_format(matrix.format, matrix.shape[1])
        return DenseFormat(self.dtype) if packed is None or matrix.order is not None else packed

    def _part(self, pieces: list[_Piece], columns: int) -> WeightPart:
        """The rows of these matrices one below the other."""
        rows = sum(piece.rows for piece in pieces)
        part = WeightPart.empty(pieces[0].format, rows, columns, self.ops.device)
        start = 0
        for piece in pieces:
            if isinstance(piece.format, DenseFormat):
                self._read_part(piece.name, part.tensors["values"][start : start + piece.rows], stored_transposed=False)
            else:
                self._send_matrix(piece, part, start)
            start += piece.rows
        return part

    def _send_matrix(self, piece: _Piece, part: WeightPart, first: int) -> None:
        """A matrix into the rows of a part from `first` on."""
        matrix, format = self.checkpoint.tensor(piece.name), part.format
        assert isinstance(matrix, StoredMatrix)
        columns = part.shape[1]
        step = max(CHUNK_BYTES // format.nbytes(1, columns) // format.row_step, 1) * format.row_step
        packed = format if isinstance(format, PackedGroupFormat) else None
        for start in range(0, piece.rows, step):
            rows = slice(start, min(start + step, piece.rows))
            for name, tensor in part.tensors.items():
                share = 1 if tensor.shape[0] == part.shape[0] else format.row_step  # rows that a row of it is for
                target = tensor[(first + rows.start) // share : -(-(first + rows.stop) // share)]
                make = partial(_packed, matrix, packed, name, rows) if packed else partial(matrix.array, name, rows)
                self._stream.send(target, make)

    def _count_bytes(self) -> int:
        total = 0
        for name in dict.fromkeys(self._all_names()):
            stored = self.checkpoint.tensor(name)
            if isinstance(stored, StoredMatrix):
                total += self._format_of(stored).nbytes(*stored.shape)
            else:
                total += int(np.prod(stored.shape)) * self.dtype.itemsize
        return total


def _packed(matrix: StoredMatrix, format: PackedGroupFormat, name: str, rows: slice) -> Array:
    return format.packed(name, matrix.format, lambda stored: matrix.array(stored, rows), rows, matrix.shape[1])


def _groups(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Neighbours that can be one part: of one format, and all but the last with whole steps of its rows."""
    for format, group in itertools.groupby(pieces, key=lambda piece: piece.format):
        together: list[_Piece] = []
        for piece in group:
            if together and sum(other.rows for other in together) % format.row_step:
                yield together
                together = []
            together.append(piece)
        yield together
