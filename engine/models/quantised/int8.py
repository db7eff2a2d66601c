"""Matrices of int8 with a scale for each row, activations of int8: W8A8 of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tessera.engine.formats import Int8RowsFormat
from tessera.engine.formats.format import Array
from tessera.engine.models.quantised.stored import SCALES, ModuleTensors, Scheme, StoredMatrix
from tessera.engine.tensor import int8


@dataclass(frozen=True)
class Int8Scheme(Scheme):
    """`weight` [N, K] int8 times `weight_scale`, one number or [N, 1]."""

    activations: Literal["static", "dynamic", "none"]

    weight = "weight"
    others = ("weight_scale", "input_scale")

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return Int8Matrix(self, tensors)

    def __str__(self) -> str:
        return "INT8" + (" (weights alone)" if self.activations == "none" else "")


class Int8Matrix(StoredMatrix):
    def __init__(self, scheme: Int8Scheme, tensors: ModuleTensors) -> None:
        self._values = tensors.matrix("weight", (int8,))
        rows, columns = self.shape = self._values.shape
        shapes = ((), (1,), (1, 1), (rows, 1), (rows,))
        stored = tensors.tensor("weight_scale", SCALES, *shapes, why=f"{rows} x {columns} values")
        self._scales = np.broadcast_to(stored.astype(np.float32).reshape(-1), (rows,))
        scale = tensors.number("input_scale") if scheme.activations == "static" else None
        self.format = Int8RowsFormat(scheme.activations != "none", scale)

    def array(self, name: str, rows: slice) -> Array:
        return (self._values if name == "values" else self._scales)[rows]
