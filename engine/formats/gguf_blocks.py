"""Matrices in the quantised blocks of GGUF files, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat
from tessera.engine.gguf.blocks import dequantize
from tessera.engine.gguf.tensor_types import TENSOR_TYPES, TensorType
from tessera.engine.tensor import uint8

TYPES = {type.name: type for type in TENSOR_TYPES.values()}


@dataclass(frozen=True)
class BlockFormat(WeightFormat, abstract=True):
    """`blocks` [R, bytes of a row] uint8; each format is one TensorType, by its name in small letters."""

    type: ClassVar[TensorType]
    tensor_names = ("blocks",)
    on_cuda = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.type = TYPES[cls.name.upper()]

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        """Raises: ValueError where the blocks do not fill a row."""
        if columns % self.type.block_size:
            raise ValueError(f"{columns} columns are no multiple of the {self.type.block_size} of {self.type.name}")
        return (TensorLayout((rows, self.type.row_bytes(columns)), uint8),)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        return dequantize(arrays["blocks"][rows], self.type)


class Q4_0Format(BlockFormat):
    name = "q4_0"


class Q4_1Format(BlockFormat):
    name = "q4_1"


class Q5_0Format(BlockFormat):
    name = "q5_0"


class Q5_1Format(BlockFormat):
    name = "q5_1"


class Q8_0Format(BlockFormat):
    name = "q8_0"


class Q2_KFormat(BlockFormat):
    name = "q2_k"


class Q3_KFormat(BlockFormat):
    name = "q3_k"


class Q4_KFormat(BlockFormat):
    name = "q4_k"


class Q5_KFormat(BlockFormat):
    name = "q5_k"


class Q6_KFormat(BlockFormat):
    name = "q6_k"


class IQ4_NLFormat(BlockFormat):
    name = "iq4_nl"


class IQ4_XSFormat(BlockFormat):
    name = "iq4_xs"


class MXFP4Format(BlockFormat):
    name = "mxfp4"


BLOCK_FORMATS: dict[str, BlockFormat] = {
    format.type.name: format
    for format in (
        *(Q4_0Format(), Q4_1Format(), Q5_0Format(), Q5_1Format(), Q8_0Format()),
        *(Q2_KFormat(), Q3_KFormat(), Q4_KFormat(), Q5_KFormat(), Q6_KFormat()),
        *(IQ4_NLFormat(), IQ4_XSFormat(), MXFP4Format()),
    )
}
