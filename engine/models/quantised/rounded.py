"""Plain matrices that are rounded to a quantised format while they load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tessera.engine.formats import Fp8Format, GroupFormat
from tessera.engine.formats.format import Array, Float32Array
from tessera.engine.models.quantised.stored import ModuleTensors, Scheme, StoredMatrix

RoundingName = Literal["fp8", "int4"]
GROUP = 128
ROUNDED: dict[RoundingName, Fp8Format | GroupFormat] = {"fp8": Fp8Format(), "int4": GroupFormat(4, GROUP)}


@dataclass(frozen=True)
class RoundedScheme(Scheme):
    """`weight` [N, K] of any float dtype, [K, N] where `transposed`, rounded to nearest."""

    name: RoundingName
    transposed: bool

    weight = "weight"
    others = ()
    takes_plain = True

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return RoundedMatrix(self, tensors)

    def holds(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[0 if self.transposed else 1] % 2 == 0

    def __str__(self) -> str:
        return {"fp8": "FP8", "int4": f"INT4 in groups of {GROUP}"}[self.name] + ", rounded while loading"


class RoundedMatrix(StoredMatrix):
    format: Fp8Format | GroupFormat

    def __init__(self, scheme: RoundedScheme, tensors: ModuleTensors) -> None:
        stored = tensors.plain("weight")
        self._stored = stored.T if scheme.transposed else stored
        self._tensors = tensors
        self.shape = self._stored.shape
        self.format = ROUNDED[scheme.name]

    def array(self, name: str, rows: slice) -> Array:
        wide: Float32Array = self._stored[rows].astype(np.float32)
        made = self.format.rounded(name, wide)
        if name == "scales" and not np.isfinite(made).all():
            self._tensors.refuse("weight", "has values that are not finite")
        return made
