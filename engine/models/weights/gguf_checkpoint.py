"""The weights of a GGUF file by their Hugging Face names, with rows in the order that the decoder wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def reordered(self, order: Array) -> GGUFTensor:
        """With row `order[i]` as row i."""
        found = GGUFTensor(self._model, self._name, order if self._order is None else self._order[order])
        found.shape = (len(order), *self.shape[1:])
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
        found = GGUFTensor(self._model, self._name, None)
        found.shape = self.shape[1:]
        found._stored = self._stored[expert * self.shape[1] : (expert + 1) * self.shape[1]]
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
