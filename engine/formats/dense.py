"""Matrices of float32, float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat
from tessera.engine.tensor import float32


@dataclass(frozen=True)
class DenseFormat(WeightFormat):
    """`values` [R, K] in `dtype`, which is that of the activations too."""

    dtype: np.dtype[Any]

    name = "dense"
    tensor_names = ("values",)

    @property
    def label(self) -> str:
        return self.dtype.name

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout((rows, columns), self.dtype),)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        """Of float32 itself, where `rows` is a slice."""
        return arrays["values"][rows].astype(float32, copy=False)

    def multiplies(self, dtype: np.dtype[Any]) -> bool:
        return dtype == self.dtype
