"""Eight-bit floats with scales: FP8 checkpoints, and what `--quantization fp8` makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat, cut_groups
from tessera.engine.tensor import float32, uint8

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = np.float32(448)
E4M3_VALUES: Float32Array = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # of each code


@dataclass(frozen=True)
class Fp8Format(WeightFormat):
    """w[r, k] = e4m3(values[r, k]) * scale: `values` [R, K] uint8, `scales` float32.

    e4m3 is that of the OCP 8-bit floating point specification 1.0: bias 7, no infinity, 0x7f and 0xff are NaN.

    Attributes:
        block: rows and columns that share a scale: `scales` is [ceil(R / rows), ceil(K / columns)]. None: a scale for
            each row, [R, 1]; that of a whole tensor is repeated.
        rounds_input: whether products take activations rounded to e4m3 as well.
        input_scale: of rounded activations. None: one for each token, or for each token and `block` columns, which
            makes the largest magnitude 448.
    """

    block: tuple[int, int] | None = None
    rounds_input: bool = True
    input_scale: float | None = None

    name = "fp8"
    tensor_names = ("values", "scales")
    on_cuda = True

    @property
    def label(self) -> str:
        return "FP8"

    @property
    def row_step(self) -> int:
        return 1 if self.block is None else self.block[0]

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        high, wide = self.block or (1, columns)
        scales = (-(-rows // high), -(-columns // wide))
        return TensorLayout((rows, columns), uint8), TensorLayout(scales, float32)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        values, scales = arrays["values"], arrays["scales"]
        result = E4M3_VALUES[values[rows]]
        if self.block is None:
            result *= scales[rows]
            return result
        high, wide = self.block
        of_rows = scales[np.arange(len(values))[rows] // high]
        result *= np.repeat(of_rows, wide, axis=1)[:, : values.shape[1]]
        return result

    def cut(self, columns: slice, width: int) -> tuple[WeightFormat, dict[str, slice]]:
        scales = slice(None) if self.block is None else cut_groups(columns, width, self.block[1])
        return self, {"values": columns, "scales": scales}

    def input_of(self, x: Float32Array) -> Float32Array:
        """x [M, K] as products by such a weight take it."""
        if not self.rounds_input:
            return x
        if self.input_scale is not None:
            return _rounded(x, np.float32(self.input_scale))
        width = x.shape[1] if self.block is None else self.block[1]
        pieces = [x[:, start : start + width] for start in range(0, x.shape[1], width)]
        return np.concatenate([_rounded(piece, scales_of(piece)) for piece in pieces], axis=1)

    @classmethod
    def quantize(cls, values: Array) -> dict[str, Array]:
        """Tensors for [R, K], see `rounded`."""
        return {name: cls.rounded(name, values.astype(float32)) for name in cls.tensor_names}

    @staticmethod
    @np.errstate(all="ignore")
    def rounded(name: str, values: Float32Array) -> Array:
        """Tensor `name` for [R, K], a scale a row: rounded to nearest, each row's largest magnitude becomes 448."""
        scales = scales_of(values)
        return scales if name == "scales" else codes_of(values / scales)


def scales_of(values: Float32Array) -> Float32Array:
    """That make the largest magnitude of each row 448, or 1 where a row is zeros, [R, 1]."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    scales: Float32Array = np.where(largest == 0, np.float32(1), largest / E4M3_MAX).astype(np.float32)
    return np.maximum(scales, np.finfo(np.float32).tiny)


def codes_of(values: Float32Array) -> Array:
    """The nearest codes, uint8, ties to even; magnitudes above 448 become 448."""
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)


@np.errstate(all="ignore")
def _rounded(x: Float32Array, scale: Float32Array | np.float32) -> Float32Array:
    result: Float32Array = E4M3_VALUES[codes_of(x / scale)] * scale
    return result
