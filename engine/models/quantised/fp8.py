"""Matrices of e4m3 with scales: compressed-tensors, `quant_method` fp8 and ModelOpt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tessera.engine.formats import Fp8Format
from tessera.engine.formats.format import Array
from tessera.engine.formats.fp8 import E4M3
from tessera.engine.models.quantised.stored import SCALES, ModuleTensors, Scheme, StoredMatrix


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """`weight` [N, K] e4m3, to be multiplied by `scale_name`: one number, [N, 1] or one for each block.

    Attributes:
        block: rows and columns that share a scale; None: a tensor or a row.
        activations: rounded by a scale from the checkpoint (`input_scale`), by one for each token, or not.
    """

    block: tuple[int, int] | None
    activations: Literal["static", "dynamic", "none"]
    scale_name: str = "weight_scale"

    weight = "weight"
    others = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return Fp8Matrix(self, tensors)

    def __str__(self) -> str:
        scales = "" if self.block is None else f" in blocks of {self.block[0]} x {self.block[1]}"
        return f"FP8{scales}" + (" (weights alone)" if self.activations == "none" else "")


class Fp8Matrix(StoredMatrix):
    def __init__(self, scheme: Fp8Scheme, tensors: ModuleTensors) -> None:
        self._values = tensors.matrix("weight", (E4M3,))
        rows, columns = self.shape = self._values.shape
        why = f"{rows} x {columns} values"
        if scheme.block is None:
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows, 1), (rows,))
        else:
            high, wide = scheme.block
            why += f" in blocks of {high} x {wide}"
            shapes = ((-(-rows // high), -(-columns // wide)),)
        stored = tensors.tensor(scheme.scale_name, SCALES, *shapes, why=why).astype(np.float32)
        self._scales = stored if scheme.block is not None else np.broadcast_to(stored.reshape(-1, 1), (rows, 1))
        scale = None
        if scheme.activations == "static":
            scale = tensors.number("activation_scale" if tensors.has("activation_scale") else "input_scale")
        self.format = Fp8Format(scheme.block, scheme.activations != "none", scale)

    def array(self, name: str, rows: slice) -> Array:
        if name == "values":
            return self._values[rows].view(np.uint8)
        step = self.format.row_step
        return self._scales[rows.start // step : -(-rows.stop // step)]
