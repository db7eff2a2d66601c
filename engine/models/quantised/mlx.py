"""Matrices of integers with a scale and an offset for each group: MLX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.engine.formats import AffineFormat
from tessera.engine.formats.format import Array
from tessera.engine.models.quantised.stored import INT32, SCALES, ModuleTensors, Scheme, StoredMatrix, unpacked


@dataclass(frozen=True)
class MlxScheme(Scheme):
    """`weight` [N, K bits / 32] uint32 along rows, `scales` and `biases` [N, K / group] (mlx.core.quantize)."""

    bits: int
    group: int

    weight = "weight"
    others = ("scales", "biases")

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return MlxMatrix(self, tensors)

    def __str__(self) -> str:
        return f"MLX INT{self.bits} in groups of {self.group}"


class MlxMatrix(StoredMatrix):
    format: AffineFormat

    def __init__(self, scheme: MlxScheme, tensors: ModuleTensors) -> None:
        self._words = tensors.matrix("weight", INT32)
        rows, words = self._words.shape
        self.shape = (rows, words * 32 // scheme.bits)
        self.format = AffineFormat(scheme.bits, scheme.group)
        shape = (rows, -(-self.shape[1] // scheme.group))
        why = f"{rows} x {self.shape[1]} integers in groups of {scheme.group}"
        self._others = {
            name: tensors.tensor(stored, SCALES, shape, why=why)
            for name, stored in (("scales", "scales"), ("offsets", "biases"))
        }

    def array(self, name: str, rows: slice) -> Array:
        if name == "values":
            return self.format.stored(unpacked(self._words[rows], self.format.bits))
        return self._others[name][rows].astype(np.float32)
