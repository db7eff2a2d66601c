"""Quantised weights as CUDA kernels take them: integers in steps of 128 elements, and headers.

A row is cut into steps of 128 elements. Four lanes of a warp take 32 elements of a step each, eight at a time, and
get them as whole words: lane t's words j, or fields of them, are elements 8 r to 8 r + 7 of its 32 with
r = j ^ t, so that the four lanes, which read the activations at the same time, never meet in a bank of shared
memory. Of eight elements the even ones lie in the lower half of a word and the odd ones in the upper half: a mask then
takes a pair, as the tensor cores want it.

What a step has beside its integers lies apart.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from tessera.engine.formats.format import Array, TensorLayout, WeightFormat
from tessera.engine.tensor import uint32

STEP = 128  # elements
LANES = 4
ROUNDS = 4  # of eight elements, of a lane a step

KERNEL_FORMATS: dict[str, PackedFormat] = {}


class PackedFormat(WeightFormat, abstract=True):
    """`codes` [R, steps x step_words] and `headers` [R, spans x header_words] uint32.

    Attributes:
        kernel_type: the struct of `cuda_src/include/quant/block_formats.cuh` that describes it.
        planes: how the bits of an integer are split, lowest first: of 8, 4, 2 and 1. Each plane of a step lies lane
            after lane.
        span: elements that a header is for, a step or two.
        scale_elements: elements that share a scale, or 32 of those that do.
    """

    kernel_type: ClassVar[str]
    planes: ClassVar[tuple[int, ...]]
    scale_elements: ClassVar[int] = 32
    tensor_names = ("codes", "headers")

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__(abstract=abstract)
        if not abstract:
            KERNEL_FORMATS[cls.kernel_type] = cls()

    @property
    @abstractmethod
    def span(self) -> int: ...

    @property
    @abstractmethod
    def header_words(self) -> int:
        """Of a span."""

    @property
    def lane_words(self) -> int:
        """Of a lane a step: one for each bit of 32 elements."""
        return sum(self.planes)

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        spans = -(-columns // self.span)
        steps = spans * (self.span // STEP)
        return (
            TensorLayout((rows, steps * LANES * self.lane_words), uint32),
            TensorLayout((rows, spans * self.header_words), uint32),
        )

    def codes_of(self, numbers: Array) -> Array:
        """[n, 128] uint8 -> [n, words] uint32."""
        pairs = numbers.reshape(-1, LANES, ROUNDS, 4, 2)[:, LANE, ROUND]
        planes, shift = [], 0
        for bits in self.planes:
            fields = (pairs >> np.uint8(shift) & np.uint8((1 << bits) - 1)).astype(np.uint32) << _places(bits)
            words = np.bitwise_or.reduce(fields.reshape(len(numbers), LANES, bits, -1), axis=3)
            planes.append(_lane_after_lane(words))
            shift += bits
        return np.concatenate(planes, axis=1)

    def numbers_of(self, codes: Array) -> Array:
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
ROUND = np.arange(ROUNDS) ^ LANE


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
