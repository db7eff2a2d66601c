"""Unsigned integers of 4 or 8 bits of which groups along a row share a scale: AWQ, GPTQ, compressed-tensors, MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat, cut_groups
from tessera.engine.tensor import float32, uint8


@dataclass(frozen=True)
class IntegerFormat(WeightFormat, abstract=True):
    """`values` [R, K] uint8, or [R, K / 2] of 4 bits with the element of even number in the low half of a byte.

    Attributes:
        bits: of an integer, 4 or 8.
        group: columns that share a scale; the last group of a row may be shorter.
    """

    bits: int = 4
    group: int = 128

    on_cuda = False

    @property
    def label(self) -> str:
        return f"INT{self.bits}"

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        """Raises: ValueError where two integers of 4 bits do not fill a byte."""
        if self.bits == 4 and columns % 2:
            raise ValueError(f"{columns} columns of 4 bits do not fill whole bytes")
        groups = -(-columns // self.group)
        values = TensorLayout((rows, columns * self.bits // 8), uint8)
        return values, TensorLayout((rows, groups), float32), TensorLayout((rows, groups), self._last_dtype)

    _last_dtype: ClassVar[np.dtype[np.uint8] | np.dtype[np.float32]]

    def cut(self, columns: slice, width: int) -> tuple[WeightFormat, dict[str, slice]]:
        groups = cut_groups(columns, width, self.group)
        values = columns if self.bits == 8 else cut_groups(columns, width, 2)
        narrow = replace(self, group=min(self.group, columns.stop - columns.start))
        return narrow, {name: values if name == "values" else groups for name in self.tensor_names}

    def integers(self, values: Array) -> Array:
        """[n, K] uint8 of some rows of `values`."""
        return values if self.bits == 8 else nibbles(values)

    def stored(self, integers: Array) -> Array:
        """The inverse."""
        return integers if self.bits == 8 else integers[:, ::2] | integers[:, 1::2] << np.uint8(4)

    def _spread(self, of_groups: Array, columns: int) -> Array:
        return np.repeat(of_groups, self.group, axis=1)[:, :columns]


@dataclass(frozen=True)
class GroupFormat(IntegerFormat):
    """w[r, k] = (values[r, k] - zeros[r, g]) * scales[r, g] with g = k // group.

    `scales` [R, groups] float32, `zeros` [R, groups] uint8.
    """

    name = "int_groups"
    tensor_names = ("values", "scales", "zeros")
    _last_dtype = uint8

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        integers = self.integers(arrays["values"][rows])
        result = integers.astype(float32)
        result -= self._spread(arrays["zeros"][rows], result.shape[1])
        result *= self._spread(arrays["scales"][rows], result.shape[1])
        return result

    def quantize(self, values: Array) -> dict[str, Array]:
        """Tensors for [R, K], see `rounded`."""
        return {name: self.rounded(name, values.astype(float32)) for name in self.tensor_names}

    @np.errstate(all="ignore")
    def rounded(self, name: str, values: Float32Array) -> Array:
        """Tensor `name` for [R, K], rounded to nearest: from the smallest to the largest number of a group, or 0.

        Scales keep 15 bits of their fraction, which kernels have, too.
        """
        rows, columns = values.shape
        groups = np.pad(values, ((0, 0), (0, -columns % self.group)), mode="edge").reshape(rows, -1, self.group)
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        most = np.float32((1 << self.bits) - 1)
        steps = np.maximum((high - low) / most, np.finfo(np.float32).tiny)
        scales: Array = (steps.view(np.uint32) + np.uint32(0x80) & np.uint32(0xFFFFFF00)).view(np.float32)
        if name == "scales":
            return scales
        zeros: Array = np.clip(np.rint(-low / scales), 0, most)
        if name == "zeros":
            return zeros.astype(np.uint8)
        integers: Array = groups / scales[:, :, None]
        np.rint(integers, out=integers)
        integers += zeros[:, :, None]
        np.clip(integers, 0, most, out=integers)
        return self.stored(integers.reshape(rows, -1)[:, :columns].astype(np.uint8))


@dataclass(frozen=True)
class AffineFormat(IntegerFormat):
    """w[r, k] = values[r, k] * scales[r, g] + offsets[r, g] with g = k // group: MLX.

    `scales` and `offsets` [R, groups] float32.
    """

    name = "affine_groups"
    tensor_names = ("values", "scales", "offsets")
    _last_dtype = float32

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        result = self.integers(arrays["values"][rows]).astype(float32)
        result *= self._spread(arrays["scales"][rows], result.shape[1])
        result += self._spread(arrays["offsets"][rows], result.shape[1])
        return result


def nibbles(values: Array) -> Array:
    """The two halves of each byte, the low one first: [n, m] uint8 -> [n, 2 m]."""
    result = np.empty((len(values), values.shape[1], 2), np.uint8)
    np.bitwise_and(values, np.uint8(15), out=result[:, :, 0])
    np.right_shift(values, np.uint8(4), out=result[:, :, 1])
    return result.reshape(len(values), -1)
