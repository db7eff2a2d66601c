"""Eight-bit integers with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat
from tessera.engine.tensor import float32, int8

INT8_MAX = np.float32(127)


@dataclass(frozen=True)
class Int8RowsFormat(WeightFormat):
    """w[r, k] = values[r, k] * scales[r]: `values` [R, K] int8, `scales` [R] float32.

    Attributes:
        rounds_input: whether products on the CPU take activations rounded to int8 as well.
        input_scale: of rounded activations. None: one for each token, which makes the largest magnitude 127.
    """

    rounds_input: bool = False
    input_scale: float | None = None

    name = "int8_rows"
    tensor_names = ("values", "scales")

    @property
    def label(self) -> str:
        return "INT8"

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        return TensorLayout((rows, columns), int8), TensorLayout((rows,), float32)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        result = arrays["values"][rows].astype(float32)
        result *= arrays["scales"][rows, None]
        return result

    def cut(self, columns: slice, width: int) -> tuple[WeightFormat, dict[str, slice]]:
        return self, {"values": columns}

    @np.errstate(all="ignore")
    def input_of(self, x: Float32Array) -> Float32Array:
        """x [M, K] as products by such a weight take it."""
        if not self.rounds_input:
            return x
        if self.input_scale is not None:
            scales = np.full((len(x), 1), self.input_scale, np.float32)
        else:
            scales = np.abs(x).max(axis=1, keepdims=True) / INT8_MAX
            scales[scales == 0] = 1
        result: Float32Array = np.clip(np.rint(x / scales), -128, 127) * scales
        return result

    @staticmethod
    def quantize(values: Array) -> dict[str, Array]:
        """Tensors for [R, K]: symmetric, rounded to nearest, each row's largest magnitude becomes 127."""
        wide = values.astype(float32)
        scales = np.abs(wide).max(axis=1) / INT8_MAX
        divisors = np.where(scales > 0, scales, np.float32(1))
        return {"values": np.rint(wide / divisors[:, None]).astype(int8), "scales": scales}
