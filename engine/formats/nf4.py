"""Four bits that choose among the quantiles of a normal distribution: NF4 of bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat, cut_groups
from tessera.engine.formats.groups import nibbles
from tessera.engine.tensor import float32, uint8

# Dettmers et al., QLoRA (2023), appendix E.
NF4_VALUES: Float32Array = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


@dataclass(frozen=True)
class Nf4Format(WeightFormat):
    """w[r, k] = NF4_VALUES[values[r, k]] * scales[r, k // group].

    `values` [R, K / 2] uint8 with the element of even number in the low half of a byte, `scales` [R, groups] float32.
    """

    group: int = 64

    name = "nf4"
    tensor_names = ("values", "scales")
    on_cuda = False

    @property
    def label(self) -> str:
        return "NF4"

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        """Raises: ValueError where two codes do not fill a byte."""
        if columns % 2:
            raise ValueError(f"{columns} columns of 4 bits do not fill whole bytes")
        return TensorLayout((rows, columns // 2), uint8), TensorLayout((rows, -(-columns // self.group)), float32)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        result = NF4_VALUES[nibbles(arrays["values"][rows])]
        result *= np.repeat(arrays["scales"][rows], self.group, axis=1)[:, : result.shape[1]]
        return result

    def cut(self, columns: slice, width: int) -> tuple[WeightFormat, dict[str, slice]]:
        return self, {
            "values": cut_groups(columns, width, 2),
            "scales": cut_groups(columns, width, self.group),
        }

    def quantize(self, values: Array) -> dict[str, Array]:
        """Tensors for [R, K]: the nearest values, scaled by the largest magnitude of each group."""
        wide = values.astype(float32)
        rows, columns = wide.shape
        groups = np.pad(wide, ((0, 0), (0, -columns % self.group))).reshape(rows, -1, self.group)
        scales = np.abs(groups).max(axis=2)
        divided = groups / np.where(scales > 0, scales, np.float32(1))[:, :, None]
        codes = np.searchsorted((NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2, divided).reshape(rows, -1)[:, :columns]
        return {"values": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), "scales": scales}
