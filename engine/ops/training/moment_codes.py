"""An optimiser's moments in eight bits: blocks of codes with a scale each (Dettmers et al. 2022, arXiv 2110.02861)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.tensor import Device, Tensor, float32, uint32, zeros

BLOCK = 256  # elements of a tensor in a row, which share a scale
CODES_A_WORD = 4
NUM_CODES = 256
EXPONENTS = 7  # decades below a block's largest magnitude

Floats = np.ndarray[Any, np.dtype[np.float32]]


class CodedMoment(NamedTuple):
    """A moment of `size` elements.

    Attributes:
        codes: [blocks, BLOCK / 4] uint32, four codes a word, the first in the lowest byte; zeros' behind the last
            element.
        scales: [blocks] float32, the largest magnitude of each block.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, size: int, device: Device, *, signed: bool) -> CodedMoment:
        blocks = -(-size // BLOCK)
        codes = zeros((blocks, BLOCK // CODES_A_WORD), uint32, device)
        if signed:
            codes.upload(np.full(codes.shape, zero_code() * 0x01010101, np.uint32))
        return cls(codes, zeros((blocks,), float32, device))

    def fits(self, size: int) -> bool:
        blocks = -(-size // BLOCK)
        return (
            self.codes.shape == (blocks, BLOCK // CODES_A_WORD)
            and self.codes.dtype == uint32
            and self.scales.shape == (blocks,)
            and self.scales.dtype == float32
        )


@cache
def code_values(*, signed: bool) -> Floats:
    """The codes' values, as shares of a block's largest magnitude: [NUM_CODES], ascending.

    Dynamic tree quantisation: a number has a decade, 10^-e, and its place between a tenth and one of it; the fewer bits
    the decade takes, the more the place has. With a sign decade e has 2^(6 - e) places, else 2^(7 - e). Beside them
    there are 0 and 1.
    """
    positive: list[float] = [1.0]
    for decade in range(EXPONENTS):
        places = 2 ** (EXPONENTS - decade - signed)
        edges = np.linspace(0.1, 1.0, places + 1)
        positive += (10.0**-decade * (edges[:-1] + edges[1:]) / 2).tolist()
    negative = [-value for value in positive if value != 1.0] if signed else []
    return np.array(sorted([*negative, 0.0, *positive]), np.float32)


@cache
def code_bounds(*, signed: bool) -> Floats:
    """[NUM_CODES - 1]; a share below bound i, or at it, has a code up to i."""
    values = code_values(signed=signed)
    return ((values[1:] + values[:-1]) * np.float32(0.5)).astype(np.float32)


def zero_code() -> int:
    """Of the signed codes; of the others it is 0."""
    return int(np.flatnonzero(code_values(signed=True) == 0)[0])
