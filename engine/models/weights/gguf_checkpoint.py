"""The weights of a GGUF file by their Hugging Face names, with rows in the order that the decoder wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.gguf.block_parts import Bytes, Float32Array
from tessera.engine.gguf.blocks import dequantize
from tessera.engine.gguf.model import GGUFModel, open_gguf
from tessera.engine.gguf.tensor_types import TensorType
from tessera.engine.models.gguf.names import TensorNames
from tessera.engine.tensor import float32

Array = np.ndarray[Any, Any]


class GGUFTensor:
    """One weight as it is stored. `tensor[rows]` are some of its rows, or elements of a vector, in float32.

    Attributes:
        shape: as a Hugging Face checkpoint has it, outputs first.
        type: which its blocks are of.
    """

    dtype = float32

    def __init__(self, model: GGUFModel, name: str, order: Array | None) -> None:
        info = model.tensors[name]
        self._model, self._name = model, name
        self.shape = info.shape if order is None else (len(order), *info.shape[1:])
        self.type: TensorType = info.type
        self._stored = model.stored(name)
        self._order = order

    def chosen(self, rows: Array | None, columns: slice | None) -> GGUFTensor:
        """With row `rows[i]` as row i; None: all. Raises: ValueError where columns are not whole blocks."""
        found = copy(self)
        if rows is not None:
            found._order = rows if self._order is None else self._order[rows]
            found.shape = (len(rows), *self.shape[1:])
        if columns is not None:
            size, nbytes = self.type.block_size, self.type.block_bytes
            if columns.start % size or columns.stop % size:
                raise ValueError(f"columns {columns.start} to {columns.stop - 1} are not whole blocks of {size}")
            found.shape = (found.shape[0], columns.stop - columns.start)
            found._stored = self._stored[:, columns.start // size * nbytes : columns.stop // size * nbytes]
        return found

    def chosen_of_experts(self, rows: Array | None, columns: slice | None) -> GGUFTensor:
        """The same rows and columns of each expert's matrix; see `chosen`."""
        experts, height, width = self.shape
        stacked = copy(self)
        stacked.shape = (experts * height, width)
        everywhere = None if rows is None else np.asarray(np.arange(experts)[:, None] * height + rows).ravel()
        found = stacked.chosen(everywhere, columns)
        found.shape = (experts, found.shape[0] // experts, found.shape[1])
        return found

    def flattened(self) -> GGUFTensor:
        """A matrix as the vector of its rows, one after the other."""
        found = GGUFTensor(self._model, self._name, None)
        found.shape = (math.prod(self.shape),)
        return found

    def as_row(self) -> GGUFTensor:
        """A vector as the matrix of one row."""
        found = GGUFTensor(self._model, self._name, None)
        found.shape = (1, *self.shape)
        return found

    def of_expert(self, expert: int) -> GGUFTensor:
        """The matrix [rows, columns] of one expert of [experts, rows, columns]."""
        rows, found = slice(expert * self.shape[1], (expert + 1) * self.shape[1]), copy(self)
        found.shape = self.shape[1:]
        if self._order is None:
            found._stored = self._stored[rows]
        else:
            found._order = self._order[rows]
        return found

    def __getitem__(self, rows: slice) -> Float32Array:
        if len(self.shape) > 1:
            return dequantize(self.blocks(rows), self.type)
        whole: Float32Array = dequantize(self._stored, self.type).ravel()
        return whole[rows] if self._order is None else whole[self._order[rows]]

    def blocks(self, rows: slice) -> Bytes:
        """Of some rows of a matrix, or of matrices on top of each other, [n, bytes of a row] uint8; a view where they
        are in order."""
        return self._stored[rows] if self._order is None else self._stored[self._order[rows]]


class StackedExperts:
    """Matrices [rows, columns] of experts, expert after expert: of each those of all parts, which have one type."""

    def __init__(self, parts: Sequence[GGUFTensor]) -> None:
        """Each [experts, rows, columns]."""
        self._parts = parts
        self._sizes = [part.shape[1] for part in parts]
        self.type = parts[0].type
        self.shape = (parts[0].shape[0] * sum(self._sizes), parts[0].shape[2])

    def blocks(self, rows: slice) -> Bytes:
        """[n, bytes of a row] uint8"""
        found = []
        row = rows.start
        while row < rows.stop:
            expert, place = divmod(row, sum(self._sizes))
            index = 0
            while place >= self._sizes[index]:
                place -= self._sizes[index]
                index += 1
            size = self._sizes[index]
            count = min(size - place, rows.stop - row)
            start = expert * size + place
            found.append(self._parts[index].blocks(slice(start, start + count)))
            row += count
        return np.concatenate(found) if len(found) > 1 else found[0]


class GGUFCheckpoint:
    """All weights of a model in GGUF. Raises: ModelError naming the file at fault."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        self._model = open_gguf(path)
        self._names = TensorNames(self._model)

    @property
    def names(self) -> set[str]:
        return set(self._names.stored)

    def path(self, name: str) -> Path:
        return self._model.file_of(self._names.stored[name])

    def tensor(self, name: str) -> GGUFTensor:
        stored = self._names.stored[name]
        return GGUFTensor(self._model, stored, self._names.row_order(stored))
