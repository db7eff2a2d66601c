"""Integers, NF4 codes and e4m3 of safetensors checkpoints as CUDA kernels take them.

A header word has the scale of 32, 64 or 128 elements of a row in its upper 24 bits, a float32 without the last eight
bits of its fraction, and the zero in the others: scales in float16 and bfloat16 are exact. Longer groups repeat theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats.format import Array, Float32Array, WeightFormat
from tessera.engine.formats.fp8 import E4M3_VALUES, Fp8Format
from tessera.engine.formats.groups import GroupFormat
from tessera.engine.formats.int8_rows import Int8RowsFormat
from tessera.engine.formats.nf4 import NF4_VALUES, Nf4Format
from tessera.engine.formats.packed import LANES, ROUND, ROUNDS, STEP, PackedFormat

LANE = STEP // LANES
ZERO_BITS = 8
LARGEST_SCALE = 128.0  # of e4m3, whose scales kernels multiply by 2^120
SIGNED_ZERO = np.uint8(128)
ArrayOf = Callable[[str], Array]


class PackedGroupFormat(PackedFormat, abstract=True):
    """See `PackedFormat`; `lanes` of 32 elements share a header word."""

    lanes: ClassVar[int]
    zero: ClassVar[np.uint8] = np.uint8(0)  # in headers, where integers have none

    def __init_subclass__(cls, *, lanes: int = 0) -> None:
        if not lanes:
            super().__init_subclass__(abstract=True)
            return
        cls.lanes = lanes
        cls.kernel_type = f"{cls.kernel_type}Group{lanes * LANE}"
        cls.name = f"packed_{cls.kernel_type.lower()}"
        super().__init_subclass__()

    @property
    def label(self) -> str:
        return self.kernel_type.partition("Group")[0].upper()

    @property
    def span(self) -> int:
        return STEP

    @property
    def header_words(self) -> int:
        return LANES // self.lanes

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        """With what fills the last step."""
        codes, headers = arrays["codes"][rows], np.ascontiguousarray(arrays["headers"][rows])
        numbers = self.numbers_of(codes.reshape(-1, LANES * self.lane_words)).reshape(len(codes), -1)
        scales = (headers & np.uint32(0xFFFFFF00)).view(np.float32)
        zeros = (headers & np.uint32(0xFF)).astype(np.float32)
        width = self.lanes * LANE
        values = self.values_of(numbers) - np.repeat(zeros - np.float32(self.zero), width, axis=1)
        result: Float32Array = values * np.repeat(scales, width, axis=1)
        return result

    def values_of(self, numbers: Array) -> Float32Array:
        """That integers stand for, less the zero of a header."""
        return numbers.astype(np.float32)

    def packed(self, name: str, stored: WeightFormat, array_of: ArrayOf, rows: slice, columns: int) -> Array:
        """Rows of tensor `name` of a matrix from those of a stored format's tensors."""
        if name == "codes":
            return self._packed_codes(_integers(stored, array_of("values")))
        scales = array_of("scales").astype(np.float32, copy=False)
        if isinstance(stored, Int8RowsFormat):
            scales = scales[:, None]
        group = columns
        if isinstance(stored, Fp8Format):
            if not (np.abs(scales) < LARGEST_SCALE).all():
                raise ModelError(f"the scale {np.abs(scales).max():g} of an FP8 weight is above {LARGEST_SCALE:g}")
            if stored.block is not None:
                group = stored.block[1]
                scales = scales[np.arange(rows.start, rows.stop) // stored.block[0] - rows.start // stored.block[0]]
        elif isinstance(stored, GroupFormat | Nf4Format):
            group = stored.group
        zeros = array_of("zeros") if isinstance(stored, GroupFormat) else self.zero
        return self._packed_headers(scales, zeros, group, columns)

    def _packed_headers(self, scales: Float32Array, zeros: Array | np.uint8, group: int, columns: int) -> Array:
        bits = np.ascontiguousarray(scales).view(np.uint32)
        rounded = bits + np.uint32(0x7F) + (bits >> np.uint32(ZERO_BITS) & np.uint32(1))
        words = rounded & np.uint32(0xFFFFFF00) | zeros
        firsts = np.arange(-(-columns // STEP) * self.header_words) * self.lanes * LANE  # elements of each word
        result: Array = np.where(firsts < columns, words[:, np.minimum(firsts // group, words.shape[1] - 1)], 0)
        return result.astype(np.uint32, copy=False)

    def _packed_codes(self, integers: Array) -> Array:
        """[n, K] uint8, or [n, K / 2] of 4 bits -> [n, words] uint32: `codes_of` by whole words."""
        a_step = STEP * sum(self.planes) // 8
        missing = -integers.shape[1] % a_step
        if missing:
            integers = np.pad(integers, ((0, 0), (0, missing)))
        rows = len(integers)
        stored = np.ascontiguousarray(integers).view(np.uint32)
        words = _even_before_odd(stored) if self.planes == (4,) else _middle_bytes_swapped(stored)
        a_round = self.lane_words // 4
        by_lane = words.reshape(-1, LANES, ROUNDS, a_round).swapaxes(0, 1)
        turned = np.stack([by_round[:, ROUND[lane]] for lane, by_round in enumerate(by_lane)], axis=1)
        if a_round == 2:  # four words of each lane, then the next four
            turned = turned.reshape(-1, LANES, 2, 4).swapaxes(1, 2)
        return np.ascontiguousarray(turned).reshape(rows, -1)


def _integers(stored: WeightFormat, values: Array) -> Array:
    """As the kernels take them: those of 8 bits signed."""
    if isinstance(stored, GroupFormat) and stored.bits == 8:
        return values ^ SIGNED_ZERO
    return values.view(np.uint8)


def _even_before_odd(words: Array) -> Array:
    """The nibbles 0, 2, 4 and 6 of each word in its lower half, the others in the upper one."""
    mask8, mask16 = np.uint32(0x00FF00FF), np.uint32(0x0000FFFF)
    halves = []
    for shift in (0, 4):
        x = words >> np.uint32(shift) & np.uint32(0x0F0F0F0F)
        x = (x | x >> np.uint32(4)) & mask8
        halves.append((x | x >> np.uint32(8)) & mask16)
    result: Array = halves[0] | halves[1] << np.uint32(16)
    return result


def _middle_bytes_swapped(words: Array) -> Array:
    """The bytes 0 and 2 of each word in its lower half, the others in the upper one."""
    outer, second, third = (np.uint32(mask) for mask in (0xFF0000FF, 0x0000FF00, 0x00FF0000))
    result: Array = words & outer | words << np.uint32(8) & third | words >> np.uint32(8) & second
    return result


class PackedInt4Format(PackedGroupFormat):
    """w = (integer - zero) * scale."""

    kernel_type = "Int4"
    planes = (4,)


class PackedInt4Group32Format(PackedInt4Format, lanes=1):
    pass


class PackedInt4Group64Format(PackedInt4Format, lanes=2):
    pass


class PackedInt4Group128Format(PackedInt4Format, lanes=4):
    pass


class PackedInt8Format(PackedGroupFormat):
    """w = (signed byte + 128 - zero) * scale."""

    kernel_type = "Int8"
    planes = (8,)
    zero = SIGNED_ZERO

    def values_of(self, numbers: Array) -> Float32Array:
        return numbers.view(np.int8).astype(np.float32)


class PackedInt8Group32Format(PackedInt8Format, lanes=1):
    pass


class PackedInt8Group64Format(PackedInt8Format, lanes=2):
    pass


class PackedInt8Group128Format(PackedInt8Format, lanes=4):
    pass


class PackedFp8Format(PackedGroupFormat):
    """w = e4m3 * scale."""

    kernel_type = "Fp8"
    planes = (8,)

    def values_of(self, numbers: Array) -> Float32Array:
        return E4M3_VALUES[numbers]


class PackedFp8Group128Format(PackedFp8Format, lanes=4):
    pass


class PackedNf4Format(PackedGroupFormat):
    """w = NF4_VALUES[code] * scale."""

    kernel_type = "Nf4"
    planes = (4,)

    def values_of(self, numbers: Array) -> Float32Array:
        return NF4_VALUES[numbers]


class PackedNf4Group64Format(PackedNf4Format, lanes=2):
    pass


class PackedNf4Group128Format(PackedNf4Format, lanes=4):
    pass


GROUP_FORMATS: dict[tuple[str, int], PackedGroupFormat] = {
    (format.kernel_type.partition("Group")[0], format.lanes): format
    for format in (
        *(PackedInt4Group32Format(), PackedInt4Group64Format(), PackedInt4Group128Format()),
        *(PackedInt8Group32Format(), PackedInt8Group64Format(), PackedInt8Group128Format()),
        *(PackedFp8Group128Format(), PackedNf4Group64Format(), PackedNf4Group128Format()),
    )
}


def packed_format(stored: WeightFormat, columns: int) -> PackedGroupFormat | None:
    """The format in which kernels take rows of `columns` elements; None where they have none."""
    if isinstance(stored, GroupFormat):
        kind, group = f"Int{stored.bits}", stored.group
    elif isinstance(stored, Nf4Format):
        kind, group = "Nf4", stored.group
    elif isinstance(stored, Int8RowsFormat):
        kind, group = "Int8", columns
    elif isinstance(stored, Fp8Format):
        kind, group = "Fp8", columns if stored.block is None else stored.block[1]
    else:
        return None
    lanes = LANES if group >= columns or group % STEP == 0 else group // LANE if group % LANE == 0 else 0
    return GROUP_FORMATS.get((kind, lanes)) if columns % LANE == 0 else None
