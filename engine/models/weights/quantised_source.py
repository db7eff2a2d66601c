"""Weights from a quantised safetensors checkpoint to the device, in a format that the device multiplies."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

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
from tessera.engine.models.quantised.stored import StoredMatrix
from tessera.engine.models.weights.build import ExpertsField, MatrixField, layer_fields
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFTensor
from tessera.engine.models.weights.stream import CHUNK_BYTES
from tessera.engine.tensor import from_numpy

logger = logging.getLogger("tessera.engine.models")

_Matrix: TypeAlias = Array | GGUFTensor | StoredMatrix


class _Piece(NamedTuple):
    """A matrix of a fused weight, in the checkpoint and as it goes to the device."""

    name: str
    rows: int
    format: WeightFormat
    order: bytes


class QuantisedSource(CheckpointSource):
    """Parts of a fused weight may differ in their schemes; what no format of the device holds becomes dense."""

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        if isinstance(field, ExpertsField):
            return super().linear(field, layer)
        names = self._names(field, "weight", layer)
        matrices = [self.checkpoint.tensor(name) for name in names]
        if not any(isinstance(matrix, StoredMatrix) for matrix in matrices):
            return super().linear(field, layer)
        if self._order(field, layer, names) is not None:  # rows of blocks cannot change their places
            return super().linear(field, layer)
        part_rows = (field.rows,) if len(names) == 1 else field.part_rows
        pieces = [self._piece(field, name, rows) for name, rows in zip(names, part_rows, strict=True)]
        orders = {piece.order for piece in pieces}
        order = None
        if len(orders) == 1 and not any(isinstance(piece.format, DenseFormat) for piece in pieces):
            order = np.frombuffer(pieces[0].order, np.int32) if pieces[0].order else None
        else:
            pieces = [piece._replace(format=DenseFormat(self.dtype)) if piece.order else piece for piece in pieces]
        parts = tuple(self._part(group, field.columns) for group in _groups(pieces))
        return LinearWeight(
            parts, self._bias(field, layer), None if order is None else from_numpy(order, self.ops.device)
        )

    def _experts(self, field: ExpertsField, layer: int) -> LinearWeight:
        """One part, so that all matrices are in one format: dense where no format holds them all."""
        names = self._names(field, "weight", layer)
        format = self._formats_of_experts[names[0]]
        if isinstance(format, DenseFormat):
            return super()._experts(field, layer)
        part = WeightPart.empty(format, field.rows, field.columns, self.ops.device)
        start = 0
        for number, name in enumerate(names):
            rows = field.part_rows[number % len(field.part_rows)]
            self._tensor(name, (rows, field.columns))
            self._send_matrix(_Piece(name, rows, format, b""), part, start)
            start += rows
        return LinearWeight((part,))

    @cached_property
    def _formats_of_experts(self) -> dict[str, WeightFormat]:
        """By the name of each expert's matrix."""
        found: dict[str, WeightFormat] = {}
        dense = stored_bytes = 0
        for layer, spec in enumerate(self.config.layers):
            for field in layer_fields(spec, self.config.hidden_size):
                if not isinstance(field, ExpertsField):
                    continue
                names = self._names(field, "weight", layer)
                matrices = [self.checkpoint.tensor(name) for name in names]
                format = self._format_of_all(field, matrices)
                found |= dict.fromkeys(names, format)
                stored = [matrix for matrix in matrices if isinstance(matrix, StoredMatrix)]
                if stored and isinstance(format, DenseFormat):
                    dense += field.rows * field.columns * self.dtype.itemsize
                    stored_bytes += sum(matrix.format.nbytes(*matrix.shape) for matrix in stored)
        if dense:
            logger.warning(
                "%s: no product takes its experts as they are stored: they are dequantised to %s, which takes %.3g GB "
                "instead of %.3g GB",
                *(self.checkpoint.folder, self.dtype.name, dense / 1e9, stored_bytes / 1e9),
            )
        return found

    def _format_of_all(self, field: ExpertsField, matrices: list[_Matrix]) -> WeightFormat:
        """That of every expert's matrix, one below the other, in the order of their columns."""
        formats: set[WeightFormat] = set()
        for matrix in matrices:
            if not isinstance(matrix, StoredMatrix) or matrix.order is not None or field.bias:
                return DenseFormat(self.dtype)
            packed = packed_format(matrix.format, matrix.shape[1])
            formats.add(matrix.format if self.on_cpu else packed or DenseFormat(self.dtype))
        if len(formats) > 1:  # experts may differ in the scale of what they multiply, which then is not rounded
            formats = {
                replace(format, rounds_input=False, input_scale=None) if isinstance(format, Fp8Format) else format
                for format in formats
            }
        steps = {rows % format.row_step for rows in field.part_rows for format in formats}
        return formats.pop() if len(formats) == 1 and steps == {0} else DenseFormat(self.dtype)

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
        return DenseFormat(self.dtype) if packed is None else packed

    def _part(self, pieces: list[_Piece], columns: int) -> WeightPart:
        """The rows of these matrices one below the other."""
        rows = sum(piece.rows for piece in pieces)
        part = WeightPart.empty(pieces[0].format, rows, columns, self.ops.device)
        start = 0
        for piece in pieces:
            if isinstance(piece.format, DenseFormat):
                self._read_part(piece.name, part.tensors["values"][start : start + piece.rows])
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
                format = self._formats_of_experts.get(name) or self._format_of(stored)
                total += format.nbytes(*stored.shape)
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
