"""The quantised blocks of GGUF files as CUDA kernels take them: the same bits in another order.

What a block has beside its integers lies apart, in the file's order, four blocks of 32 elements together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout
from tessera.engine.formats.gguf_blocks import TYPES
from tessera.engine.formats.packed import LANES, STEP, PackedFormat
from tessera.engine.gguf.blocks import weights_of
from tessera.engine.gguf.headers import HEADER_BYTES, header_of
from tessera.engine.gguf.numbers import NUMBERS
from tessera.engine.gguf.tensor_types import TensorType

WORD_BYTES = 4


@dataclass(frozen=True)
class PackedBlockFormat(PackedFormat, abstract=True):
    """See `PackedFormat`; `type` is that of the blocks."""

    type: ClassVar[TensorType]

    def __init_subclass__(cls, *, type: str, planes: tuple[int, ...], scale_elements: int = 32) -> None:
        cls.name = f"packed_{type.lower()}"
        cls.kernel_type = type
        cls.type = TYPES[type]
        cls.planes = planes
        cls.scale_elements = scale_elements
        super().__init_subclass__()

    @property
    def span(self) -> int:
        return max(self.type.block_size, STEP)

    @property
    def header_words(self) -> int:
        return -(-self._block_header_bytes * (self.span // self.type.block_size) // WORD_BYTES)

    @property
    def _block_header_bytes(self) -> int:
        return int(sum(place.stop - place.start for place in HEADER_BYTES[self.type.name]))

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        """Raises: ValueError where blocks do not fill a row."""
        if columns % self.type.block_size:
            raise ValueError(f"{columns} columns are no multiple of the {self.type.block_size} of {self.type.name}")
        return super().layout(rows, columns)

    def pack(self, stored: Array) -> dict[str, Array]:
        """The tensors for rows as a file has them, [R, bytes of a row] uint8; zeros fill the last span."""
        rows = len(stored)
        blocks_a_span = self.span // self.type.block_size
        blocks = stored.reshape(rows, -1, self.type.block_bytes)
        if missing := -blocks.shape[1] % blocks_a_span:
            blocks = np.concatenate((blocks, np.zeros((rows, missing, self.type.block_bytes), np.uint8)), axis=1)
        flat = blocks.reshape(-1, self.type.block_bytes)
        headers = header_of(flat, self.type.name).reshape(len(flat) // blocks_a_span, -1)
        padded = np.zeros((len(headers), self.header_words * WORD_BYTES), np.uint8)
        padded[:, : headers.shape[1]] = headers
        return {
            "codes": self.codes_of(NUMBERS[self.type.name](flat).reshape(-1, STEP)).reshape(rows, -1),
            "headers": padded.view(np.uint32).reshape(rows, -1),
        }

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        """With the zeros of the last span."""
        codes, headers = arrays["codes"][rows], arrays["headers"][rows]
        nbytes = self._block_header_bytes
        blocks_a_span = self.span // self.type.block_size
        headers = np.ascontiguousarray(headers).reshape(-1, self.header_words).view(np.uint8)
        headers = headers[:, : nbytes * blocks_a_span].reshape(-1, nbytes)
        numbers = self.numbers_of(codes.reshape(-1, LANES * self.lane_words)).reshape(len(headers), -1)
        return weights_of(numbers, headers, self.type.name).reshape(len(codes), -1)


class PackedQ4_0Format(PackedBlockFormat, type="Q4_0", planes=(4,)):
    pass


class PackedQ4_1Format(PackedBlockFormat, type="Q4_1", planes=(4,)):
    pass


class PackedQ5_0Format(PackedBlockFormat, type="Q5_0", planes=(4, 1)):
    pass


class PackedQ5_1Format(PackedBlockFormat, type="Q5_1", planes=(4, 1)):
    pass


class PackedQ8_0Format(PackedBlockFormat, type="Q8_0", planes=(8,)):
    pass


class PackedQ2_KFormat(PackedBlockFormat, type="Q2_K", planes=(2,), scale_elements=16):
    pass


class PackedQ3_KFormat(PackedBlockFormat, type="Q3_K", planes=(2, 1), scale_elements=16):
    pass


class PackedQ4_KFormat(PackedBlockFormat, type="Q4_K", planes=(4,)):
    pass


class PackedQ5_KFormat(PackedBlockFormat, type="Q5_K", planes=(4, 1)):
    pass


class PackedQ6_KFormat(PackedBlockFormat, type="Q6_K", planes=(4, 2), scale_elements=16):
    pass


class PackedIQ4_NLFormat(PackedBlockFormat, type="IQ4_NL", planes=(4,)):
    pass


class PackedIQ4_XSFormat(PackedBlockFormat, type="IQ4_XS", planes=(4,)):
    pass


class PackedMXFP4Format(PackedBlockFormat, type="MXFP4", planes=(4,)):
    pass


PACKED_FORMATS: dict[str, PackedBlockFormat] = {
    format.type.name: format
    for format in (
        *(PackedQ4_0Format(), PackedQ4_1Format(), PackedQ5_0Format(), PackedQ5_1Format(), PackedQ8_0Format()),
        *(PackedQ2_KFormat(), PackedQ3_KFormat(), PackedQ4_KFormat(), PackedQ5_KFormat(), PackedQ6_KFormat()),
        *(PackedIQ4_NLFormat(), PackedIQ4_XSFormat(), PackedMXFP4Format()),
    )
}
