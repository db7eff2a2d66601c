"""Matrices of 4- and 8-bit integers with a scale and a zero for each group: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from tessera.engine.formats import GroupFormat
from tessera.engine.formats.format import Array
from tessera.engine.models.quantised.stored import INT32, SCALES, ModuleTensors, Scheme, StoredMatrix, unpacked
from tessera.engine.tensor import int8

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of a word in which each of eight neighbours lies


class GroupMatrix(StoredMatrix):
    """Of a format whose columns, where groups are not in a row, are sorted by their group.

    Subclasses call `_set_groups` once they know their shape, and `_sort` last.
    """

    format: GroupFormat

    def _set_groups(self, bits: int, group: int | None) -> None:
        columns = self.shape[1]
        self.format = GroupFormat(bits, min(group or columns, columns))
        self.why = f"{self.shape[0]} x {columns} integers in groups of {self.format.group}"
        self.num_groups = -(-columns // self.format.group)

    def _sort(self, tensors: ModuleTensors, name: str) -> None:
        """By group, where this tensor has the group of each column."""
        if not tensors.has(name):
            return
        columns, group = self.shape[1], self.format.group
        groups = tensors.tensor(name, INT32, (columns,), why=f"{columns} columns").astype(np.int64)
        in_a_row = np.arange(columns) // group
        if (groups == -1).all() or np.array_equal(groups, in_a_row):  # -1: compressed-tensors, nothing was assigned
            return
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], in_a_row):
            tensors.refuse(name, f"does not put {group} columns in each of {self.num_groups} groups")
        self.order = order

    def array(self, name: str, rows: slice) -> Array:
        if name == "scales":
            return self.scales(rows)
        if name == "zeros":
            return self.zeros(rows)
        integers = self.integers(rows)
        return self.format.stored(integers if self.order is None else integers[:, self.order])

    @abstractmethod
    def integers(self, rows: slice) -> Array:
        """[n, K] uint8, with columns in the checkpoint's order."""

    @abstractmethod
    def scales(self, rows: slice) -> Array:
        """[n, groups] float32."""

    @abstractmethod
    def zeros(self, rows: slice) -> Array:
        """[n, groups] uint8."""


# -- compressed-tensors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedScheme(Scheme):
    """`weight_packed` [N, ceil(K bits / 32)] int32 along rows, `weight_scale` [N, groups], `weight_zero_point`.

    Integers and zeros are stored plus half their range; zeros are packed along columns, [ceil(N bits / 32), groups]
    int32, or int8 [N, groups] (compressed-tensors, pack_quantized.py).

    Attributes:
        group: columns that share a scale; None: a row.
    """

    bits: int
    group: int | None
    symmetric: bool

    weight = "weight_packed"
    others = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return PackedMatrix(self, tensors)

    def __str__(self) -> str:
        return f"INT{self.bits}{_groups(self.group)}"


class PackedMatrix(GroupMatrix):
    def __init__(self, scheme: PackedScheme, tensors: ModuleTensors) -> None:
        self._words = tensors.matrix("weight_packed", INT32)
        rows, words = self._words.shape
        shape = tensors.tensor("weight_shape", (np.dtype(np.int64), *INT32), (2,), why="rows and columns")
        self.shape = (rows, int(shape[1]))
        a_word = 32 // scheme.bits
        if int(shape[0]) != rows or -(-self.shape[1] // a_word) != words:
            tensors.refuse("weight_shape", f"is {shape.tolist()}, which the shape of weight_packed does not fit")
        if self.shape[1] % 2:
            tensors.refuse("weight_shape", f"is {shape.tolist()}; the columns must be even in number")
        self._set_groups(scheme.bits, scheme.group)
        scales = tensors.tensor("weight_scale", SCALES, (rows, self.num_groups), why=self.why)
        self._scales = scales
        self._half = 1 << (scheme.bits - 1)
        self._zeros: Array | None = None
        if not scheme.symmetric:
            zeros = tensors.tensor(
                "weight_zero_point",
                (*INT32, int8),
                (-(-rows // a_word), self.num_groups),
                (rows, self.num_groups),
                why=self.why,
            )
            if zeros.dtype == int8:
                self._zeros = (zeros.astype(np.int16) + self._half).astype(np.uint8)
            else:
                self._zeros = unpacked(zeros.T, scheme.bits).T[:rows]
        self._sort(tensors, "weight_g_idx")

    def integers(self, rows: slice) -> Array:
        return unpacked(self._words[rows], self.format.bits)[:, : self.shape[1]]

    def scales(self, rows: slice) -> Array:
        return self._scales[rows].astype(np.float32)

    def zeros(self, rows: slice) -> Array:
        if self._zeros is None:
            return np.full((rows.stop - rows.start, self.num_groups), self._half, np.uint8)
        return self._zeros[rows]


# -- GPTQ -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GptqScheme(Scheme):
    """`qweight` [K bits / 32, N] int32 along columns, `qzeros` [groups, N bits / 32], `scales` [groups, N].

    `g_idx` [K] is the group of each column (AutoGPTQ, qlinear_cuda.py). Zeros are stored less one, modulo their range.

    Attributes:
        group: columns that share a scale; None: all.
        zeros_are_less_one: not in the second version of the format.
    """

    bits: int
    group: int | None
    zeros_are_less_one: bool = True

    weight = "qweight"
    others = ("qzeros", "scales", "g_idx")

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return GptqMatrix(self, tensors)

    def __str__(self) -> str:
        return f"GPTQ INT{self.bits}{_groups(self.group)}"


class GptqMatrix(GroupMatrix):
    def __init__(self, scheme: GptqScheme, tensors: ModuleTensors) -> None:
        self._words = tensors.matrix("qweight", INT32)
        words, rows = self._words.shape
        a_word = 32 // scheme.bits
        self.shape = (rows, words * a_word)
        self._set_groups(scheme.bits, scheme.group)
        self._stored_scales = tensors.tensor("scales", SCALES, (self.num_groups, rows), why=self.why)
        zeros = tensors.tensor("qzeros", INT32, (self.num_groups, -(-rows // a_word)), why=self.why)
        fields = unpacked(zeros, scheme.bits)[:, :rows].T
        if scheme.zeros_are_less_one:
            fields = fields + np.uint8(1) & np.uint8((1 << scheme.bits) - 1)
        self._zeros = fields
        self._sort(tensors, "g_idx")

    def integers(self, rows: slice) -> Array:
        return unpacked(self._words[:, rows].T, self.format.bits)

    def scales(self, rows: slice) -> Array:
        return self._stored_scales[:, rows].T.astype(np.float32)

    def zeros(self, rows: slice) -> Array:
        return self._zeros[rows]


# -- AWQ ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AwqScheme(Scheme):
    """`qweight` [K, N / 8] int32, `qzeros` [groups, N / 8] int32 and `scales` [groups, N].

    A word has eight rows of the matrix, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits (AutoAWQ, gemm.py).

    Attributes:
        group: columns that share a scale; None: all.
    """

    group: int | None

    weight = "qweight"
    others = ("qzeros", "scales")

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return AwqMatrix(self, tensors)

    def __str__(self) -> str:
        return f"AWQ INT4{_groups(self.group)}"


class AwqMatrix(GroupMatrix):
    def __init__(self, scheme: AwqScheme, tensors: ModuleTensors) -> None:
        self._words = tensors.matrix("qweight", INT32)
        columns, words = self._words.shape
        self.shape = (words * 8, columns)
        self._set_groups(4, scheme.group)
        self._stored_scales = tensors.tensor("scales", SCALES, (self.num_groups, self.shape[0]), why=self.why)
        self._zeros = tensors.tensor("qzeros", INT32, (self.num_groups, words), why=self.why)

    def integers(self, rows: slice) -> Array:
        return self._fields(self._words, rows)

    def scales(self, rows: slice) -> Array:
        return self._stored_scales[:, rows].T.astype(np.float32)

    def zeros(self, rows: slice) -> Array:
        return self._fields(self._zeros, rows)

    def _fields(self, words: Array, rows: slice) -> Array:
        """[n, columns of `words`] for these rows of the matrix."""
        first, last = rows.start // 8, -(-rows.stop // 8)
        turned = np.ascontiguousarray(words[:, first:last].T).view(np.uint32)
        fields = np.empty((len(turned), 8, len(words)), np.uint8)
        for row, field in enumerate(AWQ_ORDER):
            fields[:, row] = turned >> np.uint32(4 * field) & np.uint32(15)
        return fields.reshape(-1, len(words))[rows.start - first * 8 : rows.stop - first * 8]


def _groups(group: int | None) -> str:
    return " in rows" if group is None else f" in groups of {group}"
