"""A quantised matrix as a checkpoint stores it: its tensors, checked, and their rows in a weight format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import WeightFormat
from tessera.engine.formats.format import Array, Float32Array
from tessera.engine.tensor import bfloat16, float16, float32

SCALES = (float32, float16, bfloat16)
INT32 = (np.dtype(np.int32), np.dtype(np.uint32))


class Tensors(Protocol):
    """Of a checkpoint, by name."""

    @property
    def names(self) -> set[str]: ...

    def path(self, name: str) -> Path: ...

    def tensor(self, name: str) -> Array: ...


class ModuleTensors:
    """The tensors of one module, by what follows its name. Raises: ModelError naming the tensor at fault."""

    def __init__(self, stored: Tensors, module: str) -> None:
        self.module = module
        self._stored = stored

    def has(self, name: str) -> bool:
        return f"{self.module}.{name}" in self._stored.names

    def tensor(self, name: str, dtypes: tuple[np.dtype[Any], ...], *shapes: tuple[int, ...], why: str = "") -> Array:
        """Of one of these dtypes and shapes, any shape where none is given; `why` says what makes it so."""
        full = f"{self.module}.{name}"
        if full not in self._stored.names:
            raise ModelError(f"{self.module} lacks the tensor {full}, which its quantisation calls for")
        found = self._stored.tensor(full)
        if found.dtype not in dtypes:
            accepted = " or ".join(dtype.name for dtype in dtypes)
            raise ModelError(f"{self._stored.path(full)}: tensor {full} is {found.dtype.name}; it must be {accepted}")
        if shapes and found.shape not in shapes:
            accepted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"{self._stored.path(full)}: tensor {full} has shape {list(found.shape)}, but {why} make it {accepted}"
            )
        return found

    def plain(self, name: str) -> Array:
        """A matrix in 16 or more bits."""
        return self.matrix(name, (*SCALES, np.dtype(np.float64)))

    def matrix(self, name: str, dtypes: tuple[np.dtype[Any], ...]) -> Array:
        found = self.tensor(name, dtypes)
        if found.ndim != 2 or not found.size:
            self.refuse(name, f"has shape {list(found.shape)}; it must be a matrix")
        return found

    def number(self, name: str) -> float:
        """The only element of a tensor, above 0."""
        value = float(self.tensor(name, SCALES, (), (1,), (1, 1), why="one number for a tensor").reshape(()))
        if not 0 < value < np.inf:
            self.refuse(name, f"is {value:g}; it must be above 0")
        return value

    def refuse(self, name: str, problem: str) -> None:
        full = f"{self.module}.{name}"
        raise ModelError(f"{self._stored.path(full)}: tensor {full} {problem}")


class StoredMatrix(ABC):
    """[N, K] numbers. `matrix[rows]` are some rows in float32, as of a dense tensor.

    Attributes:
        shape: N, K.
        format: that `array` has the tensors of.
        order: where columns are stored in another order, the feature of each stored column, int32 [K].
    """

    dtype = float32
    shape: tuple[int, int]
    format: WeightFormat
    order: Array | None = None

    @abstractmethod
    def array(self, name: str, rows: slice) -> Array:
        """The rows of tensor `name` of the format that hold these rows of the matrix."""

    def arrays(self, rows: slice) -> dict[str, Array]:
        return {name: self.array(name, rows) for name in self.format.tensor_names}

    def __getitem__(self, rows: slice) -> Float32Array:
        rows = slice(*rows.indices(self.shape[0])[:2])
        step = self.format.row_step
        start = rows.start // step * step
        arrays = self.arrays(slice(start, rows.stop))
        stored = self.format.dequantize(arrays, slice(rows.start - start, rows.stop - start))[:, : self.shape[1]]
        if self.order is None:
            return stored
        result = np.empty_like(stored)
        result[:, self.order] = stored
        return result


class Scheme(ABC):
    """How the matrices of some modules are stored; subclasses are frozen dataclasses.

    Attributes:
        weight: the tensor that shows that a module is stored so.
        others: those that may be beside it.
        takes_plain: that tensor is of a float dtype, and quantised only here.
    """

    weight: str
    others: tuple[str, ...]
    takes_plain = False

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor `weight` of this shape can be quantised."""
        return True

    @abstractmethod
    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        """Raises: ModelError naming the tensor that is missing or does not fit the others."""

    @abstractmethod
    def __str__(self) -> str:
        """As the start report names it."""


def unpacked(words: Array, bits: int) -> Array:
    """[n, m] 32-bit words -> [n, m * 32 / bits] uint8, the lowest bits of a word first."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return as_bytes
    result = np.empty((*as_bytes.shape, 2), np.uint8)
    np.bitwise_and(as_bytes, np.uint8(15), out=result[..., 0])
    np.right_shift(as_bytes, np.uint8(4), out=result[..., 1])
    return result.reshape(len(words), -1)
