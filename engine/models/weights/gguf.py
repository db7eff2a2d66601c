"""The weights of a GGUF file by their Hugging Face names, with rows in the order that the decoder wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.gguf import GGUFModel, TensorType, dequantize, open_gguf
from tessera.engine.gguf.block_parts import Bytes, Float32Array
from tessera.engine.models.gguf.names import TensorNames

Array = np.ndarray[Any, Any]


class GGUFTensor:
    """One weight as it is stored; slices of rows are read when asked for.

    Attributes:
        shape: as a Hugging Face checkpoint has it, outputs first.
    """

    def __init__(self, model: GGUFModel, name: str, order: Array | None) -> None:
        info = model.tensors[name]
        self.shape = info.shape
        self.type: TensorType = info.type
        self._stored = model.stored(name).reshape(self._num_rows, -1)
        self._order = order

    @property
    def _num_rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    def stored(self, rows: slice) -> Bytes:
        """The blocks of some rows, [n, bytes of a row] uint8; a view where the rows are in order."""
        return self._stored[rows] if self._order is None else self._stored[self._order[rows]]

    def values(self, rows: slice) -> Float32Array:
        """Some rows in float32 [n, K]; of a vector, some elements."""
        if len(self.shape) == 1:
            whole: Float32Array = dequantize(self._stored, self.type)[0]
            return whole[rows] if self._order is None else whole[self._order[rows]]
        return dequantize(self.stored(rows), self.type)


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
