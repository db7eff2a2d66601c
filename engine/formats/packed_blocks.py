"""The quantised blocks of GGUF files as CUDA kernels take them: the same bits in another order.

A row is cut into steps of 128 elements. Four lanes of a warp take 32 elements of a step each, eight at a time, and
get them as whole words: lane t's words j, or fields of them, are elements 8 r to 8 r + 7 of its 32 with
r = (j + t) % 4, so that the four lanes, which read the activations at the same time, never meet in a bank of shared
memory. Of eight elements the even ones lie in the lower half of a word and the odd ones in the upper half: a mask then
takes a pair, as the tensor cores want it.

What a block has beside its integers lies apart, in the file's order, four blocks of 32 elements together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tessera.engine.formats.format import Array, Float32Array, TensorLayout, WeightFormat
from tessera.engine.formats.gguf_blocks import TYPES
from tessera.engine.gguf.blocks import weights_of
from tessera.engine.gguf.headers import HEADER_BYTES, header_of
from tessera.engine.gguf.numbers import NUMBERS
from tessera.engine.gguf.tensor_types import TensorType
from tessera.engine.tensor import uint32

STEP = 128  # elements
LANES = 4
ROUNDS = 4  # of eight elements, of a lane a step
WORD_BYTES = 4


@dataclass(frozen=True)
class PackedFormat(WeightFormat, abstract=True):
    """`codes` [R, steps x step_words] and `headers` [R, spans x header_words] uint32.

    Attributes:
        type: of the blocks.
        planes: how the bits of an integer are split, lowest first: of 8, 4, 2 and 1. Each plane of a step lies lane
            after lane.
        span: elements that a header is for, a block of 256 or four of 32.
    """

    type: ClassVar[TensorType]
    planes: ClassVar[tuple[int, ...]]
    tensor_names = ("codes", "headers")

    def __init_subclass__(cls, *, type: str, planes: tuple[int, ...]) -> None:
        cls.name = f"packed_{type.lower()}"
        cls.type = TYPES[type]
        cls.planes = planes
        super().__init_subclass__()

    @property
    def span(self) -> int:
        return max(self.type.block_size, STEP)

    @property
    def lane_words(self) -> int:
        """Of a lane a step: one for each bit of 32 elements."""
        return sum(self.planes)

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
        spans = -(-columns // self.span)
        steps = spans * (self.span // STEP)
        return (
            TensorLayout((rows, steps * LANES * self.lane_words), uint32),
            TensorLayout((rows, spans * self.header_words), uint32),
        )

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
            "codes": self._codes(NUMBERS[self.type.name](flat).reshape(-1, STEP)).reshape(rows, -1),
            "headers": padded.view(np.uint32).reshape(rows, -1),
        }

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        """With the zeros of the last span."""
        codes, headers = arrays["codes"][rows], arrays["headers"][rows]
        nbytes = self._block_header_bytes
        blocks_a_span = self.span // self.type.block_size
        headers = np.ascontiguousarray(headers).reshape(-1, self.header_words).view(np.uint8)
        headers = headers[:, : nbytes * blocks_a_span].reshape(-1, nbytes)
        numbers = self._numbers(codes.reshape(-1, LANES * self.lane_words)).reshape(len(headers), -1)
        return weights_of(numbers, headers, self.type.name).reshape(len(codes), -1)

    def _codes(self, numbers: Array) -> Array:
        """[n, 128] uint8 -> [n, words] uint32."""
        pairs = numbers.reshape(-1, LANES, ROUNDS, 4, 2)[:, LANE, ROUND]
        planes, shift = [], 0
        for bits in self.planes:
            fields = (pairs >> np.uint8(shift) & np.uint8((1 << bits) - 1)).astype(np.uint32) << _places(bits)
            words = np.bitwise_or.reduce(fields.reshape(len(numbers), LANES, bits, -1), axis=3)
            planes.append(_lane_after_lane(words))
            shift += bits
        return np.concatenate(planes, axis=1)

    def _numbers(self, codes: Array) -> Array:
        """The inverse."""
        result = np.zeros((len(codes), LANES, ROUNDS, 4, 2), np.uint8)
        start = shift = 0
        for bits in self.planes:
            words = _by_lane(codes[:, start : start + LANES * bits], bits)
            fields = words[..., None] >> _places(bits).reshape(bits, -1) & np.uint32((1 << bits) - 1)
            result |= fields.astype(np.uint8).reshape(result.shape) << np.uint8(shift)
            start += LANES * bits
            shift += bits
        numbers = np.empty_like(result)
        numbers[:, LANE, ROUND] = result
        return numbers.reshape(len(codes), STEP)


# Where a lane's round lies in its 32 elements.
LANE = np.arange(LANES)[:, None]
ROUND = (np.arange(ROUNDS) + LANE) % ROUNDS


def _places(bits: int) -> Array:
    """Of the field of each element in its word, [rounds, pairs, 2]: pair i of a lane is the i-th field of two halves.

    A word has room for 16 / bits pairs; of 8 bits those of one round take two words.
    """
    pair = np.arange(ROUNDS * 4, dtype=np.uint32).reshape(ROUNDS, 4, 1)
    return pair % np.uint32(16 // bits) * np.uint32(bits) + np.array([0, 16], np.uint32)


def _lane_after_lane(words: Array) -> Array:
    """[n, lanes, words] -> [n, all]: four words of each lane at most, then the next four."""
    pieces = np.split(words, range(4, words.shape[2], 4), axis=2)
    return np.concatenate([piece.reshape(len(words), -1) for piece in pieces], axis=1)


def _by_lane(plane: Array, bits: int) -> Array:
    """The inverse, [n, lanes, bits]."""
    pieces = np.split(plane, range(4 * LANES, plane.shape[1], 4 * LANES), axis=1)
    return np.concatenate([piece.reshape(len(plane), LANES, -1) for piece in pieces], axis=2)


class PackedQ4_0Format(PackedFormat, type="Q4_0", planes=(4,)):
    pass


class PackedQ4_1Format(PackedFormat, type="Q4_1", planes=(4,)):
    pass


class PackedQ5_0Format(PackedFormat, type="Q5_0", planes=(4, 1)):
    pass


class PackedQ5_1Format(PackedFormat, type="Q5_1", planes=(4, 1)):
    pass


class PackedQ8_0Format(PackedFormat, type="Q8_0", planes=(8,)):
    pass


class PackedQ2_KFormat(PackedFormat, type="Q2_K", planes=(2,)):
    pass


class PackedQ3_KFormat(PackedFormat, type="Q3_K", planes=(2, 1)):
    pass


class PackedQ4_KFormat(PackedFormat, type="Q4_K", planes=(4,)):
    pass


class PackedQ5_KFormat(PackedFormat, type="Q5_K", planes=(4, 1)):
    pass


class PackedQ6_KFormat(PackedFormat, type="Q6_K", planes=(4, 2)):
    pass


class PackedIQ4_NLFormat(PackedFormat, type="IQ4_NL", planes=(4,)):
    pass


class PackedIQ4_XSFormat(PackedFormat, type="IQ4_XS", planes=(4,)):
    pass


class PackedMXFP4Format(PackedFormat, type="MXFP4", planes=(4,)):
    pass


PACKED_FORMATS: dict[str, PackedFormat] = {
    format.type.name: format
    for format in (
        *(PackedQ4_0Format(), PackedQ4_1Format(), PackedQ5_0Format(), PackedQ5_1Format(), PackedQ8_0Format()),
        *(PackedQ2_KFormat(), PackedQ3_KFormat(), PackedQ4_KFormat(), PackedQ5_KFormat(), PackedQ6_KFormat()),
        *(PackedIQ4_NLFormat(), PackedIQ4_XSFormat(), PackedMXFP4Format()),
    )
}
