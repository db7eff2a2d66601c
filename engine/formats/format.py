"""A weight format: which tensors hold the rows of a matrix, and the numbers they stand for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

FORMATS: dict[str, type[WeightFormat]] = {}


class TensorLayout(NamedTuple):
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFormat(ABC):
    """One way to store a matrix of R rows and K columns.

    Subclasses are frozen dataclasses and register themselves in FORMATS under their `name`. Matrices whose
    formats are equal can be stored as one, one below the other. `tensor_names` is the order in which kernels
    take the tensors of such a matrix; `on_cuda` says whether there are kernels. An `abstract` class is the base of
    several formats.
    """

    name: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]]
    on_cuda: ClassVar[bool] = True

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        if abstract:
            return
        assert cls.name not in FORMATS, f"two weight formats are called {cls.name}"
        FORMATS[cls.name] = cls

    @property
    def label(self) -> str:
        """As people know it."""
        return self.name

    @property
    def row_step(self) -> int:
        """Rows that share numbers: matrices one below the other are one where all but the last have whole steps."""
        return 1

    @abstractmethod
    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        """Of the tensors that hold [rows, columns], as named by `tensor_names`."""

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        """Some rows in float32 [n, K]; `arrays` has those of `tensor_names`."""

    def cut(self, columns: slice, width: int) -> tuple[WeightFormat, dict[str, slice]]:
        """The format of some columns of rows of `width`, and which columns of each tensor hold them.

        Raises: ValueError where they do not begin and end with steps of columns that share numbers.
        """
        raise ValueError(f"{self.label} is stored by rows alone")

    def multiplies(self, dtype: np.dtype[Any]) -> bool:
        """Whether activations of this dtype can be multiplied by such a weight."""
        return True

    def input_of(self, x: Float32Array) -> Float32Array:
        """x [M, K] as products by such a weight take it: rounded where the scheme says so."""
        return x

    def nbytes(self, rows: int, columns: int) -> int:
        return sum(tensor.nbytes for tensor in self.layout(rows, columns))


def cut_groups(columns: slice, width: int, group: int) -> slice:
    """Groups of `group` columns that hold these of `width`. Raises: ValueError where they hold others too."""
    if group >= width:
        return slice(None)
    if columns.start % group or (columns.stop % group and columns.stop != width):
        raise ValueError(f"columns {columns.start} to {columns.stop - 1} of {width} are not whole groups of {group}")
    return slice(columns.start // group, -(-columns.stop // group))
