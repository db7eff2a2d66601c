"""The weights of a GGUF file by their Hugging Face names, with rows in the order that the decoder wants."""

from __future__ import annotations

import math
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
        order = self._order if rows is None else rows if self._order is None else self._order[rows]
        found = GGUFTensor(self._model, self._name, order)
        found.shape = self.shape if rows is None else (len(rows), *self.shape[1:])
        if columns is not None:
            type = self.type
            if columns.start % type.block_size or columns.stop % type.block_size:
                raise ValueError(
                    f"columns {columns.start} to {columns.stop - 1} are not whole blocks of {type.block_size}"
                )
            first, last = (place // type.block_size * type.block_bytes for place in (columns.start, columns.stop))
            found.shape = (found.shape[0], columns.stop - columns.start)
            found._stored = found._stored[:, first:last]
        return found

    def flattened(self) -> GGUFTensor:
        """A matrix as the vector of its rows, one after the other."""
        found = GGUFTensor(self._model, self._name, None)
        found.shape = (math.prod(self.shape),)
        return found

    def __getitem__(self, rows: slice) -> Float32Array:
        if len(self.shape) > 1:
            return dequantize(self.blocks(rows), self.type)
        whole: Float32Array = dequantize(self._stored, self.type).ravel()
        return whole[rows] if self._order is None else whole[self._order[rows]]

    def blocks(self, rows: slice) -> Bytes:
        """Of some rows of a matrix, [n, bytes of a row] uint8; a view where the rows are in order."""
        return self._stored[rows] if self._order is None else self._stored[self._order[rows]]


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
