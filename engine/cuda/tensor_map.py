"""Tensor maps, which describe a matrix in memory to the TMA of sm_90."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from cuda.bindings import driver

from tessera.engine.cuda.driver import check
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.params import MAP_BYTES
from tessera.engine.tensor import Tensor, bfloat16

SWIZZLE_BYTES = Constant(128, "of a row of operands in shared memory")
SWIZZLE_ROWS = 8  # after which the swizzle repeats
SWIZZLE_REPEAT = Constant(SWIZZLE_ROWS * SWIZZLE_BYTES, "bytes of 8 rows: operands start at multiples of it")
declare_header("swizzle", __name__, {"SWIZZLE_BYTES": SWIZZLE_BYTES, "SWIZZLE_REPEAT": SWIZZLE_REPEAT})

ALIGNMENT = 16  # of a matrix's address and of its rows


def box_map(matrix: Tensor, box_rows: int) -> bytes:
    """The map of a matrix of 16-bit floats that is copied in boxes of `box_rows` rows and 64 columns.

    A box lies in shared memory row after row, its 16-byte segments XORed with the row modulo 8; what lies
    outside the matrix reads as zeros. The columns must be a multiple of 8 and the address of 16.
    """
    rows, columns = matrix.shape
    sizes, strides, box = (columns, rows), (columns * 2,), (SWIZZLE_BYTES // 2, box_rows)
    return _encode(matrix.pointer, matrix.dtype == bfloat16, sizes, strides, box)


def parts_map(matrix: Tensor, parts: int, box_rows: int) -> bytes:
    """The map of a matrix of 16-bit floats that is `parts` of as many rows, in boxes of `box_rows` rows of each.

    A box's coordinates are (0, row of each part, column). In shared memory the rows of one part follow those of
    another, as `box_map` has them.
    """
    rows, columns = matrix.shape
    of_part = rows // parts
    sizes, strides = (columns, of_part, parts), (columns * 2, of_part * columns * 2)
    return _encode(matrix.pointer, matrix.dtype == bfloat16, sizes, strides, (SWIZZLE_BYTES // 2, box_rows, parts))


def row_groups_map(pointer: int, dtype: np.dtype[Any], rows: int, columns: int, box_rows: int) -> bytes:
    """The map of a matrix of 16-bit floats that is copied in boxes of `box_rows` whole rows, both multiples of 8.

    A box's coordinates are (0, 0, 0, row / 8). In shared memory every eight rows are followed by the next
    eight; of each eight the first 64 columns come first, as `box_map` has them, then the next 64. The
    columns must be a multiple of 64 and the address of 16.
    """
    lines = columns * 2 // SWIZZLE_BYTES
    sizes = (SWIZZLE_BYTES // 2, SWIZZLE_ROWS, lines, rows // SWIZZLE_ROWS)
    strides = (columns * 2, SWIZZLE_BYTES, columns * 2 * SWIZZLE_ROWS)
    return _encode(pointer, dtype == bfloat16, sizes, strides, (*sizes[:3], box_rows // SWIZZLE_ROWS))


def lines_map(words: Tensor, box_rows: int, box_lines: int) -> bytes:
    """The map of a matrix of 32-bit words that is copied in boxes of rows and lines of 128 bytes.

    A box's coordinates are (0, row, line). The rows' first lines lie in shared memory as `box_map` has them, then their
    second ones. A row must be whole lines.
    """
    rows, columns = words.shape
    lines = columns * words.dtype.itemsize // SWIZZLE_BYTES
    sizes, strides = (SWIZZLE_BYTES // 2, rows, lines), (lines * SWIZZLE_BYTES, SWIZZLE_BYTES)
    return _encode(words.pointer, True, sizes, strides, (SWIZZLE_BYTES // 2, box_rows, box_lines))


def words_map(words: Tensor, box_rows: int, box_words: int) -> bytes:
    """The map of a matrix of 32-bit words as of pairs of 16-bit elements, in boxes that lie row after row.

    Swizzled as `box_map` has them where rows of a box are 128 bytes. Those of the matrix must be multiples of 16 bytes.
    """
    rows, columns = words.shape
    swizzled = box_words * words.dtype.itemsize == SWIZZLE_BYTES
    strides = (columns * words.dtype.itemsize,)
    return _encode(words.pointer, True, (columns * 2, rows), strides, (box_words * 2, box_rows), swizzled=swizzled)


def as_lines_map(values: Tensor, box_lines: int) -> bytes:
    """The map of 16-bit floats as lines of 64, 128 bytes, whatever their shape; boxes of lines lie in shared memory as
    they do here. There must be whole lines."""
    columns = SWIZZLE_BYTES // 2
    sizes, box = (columns, values.size // columns), (columns, box_lines)
    return _encode(values.pointer, values.dtype == bfloat16, sizes, (SWIZZLE_BYTES,), box, swizzled=False)


@lru_cache(maxsize=16384)
def _encode(
    pointer: int,
    is_bfloat16: bool,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzled: bool = True,
) -> bytes:
    """Sizes and box in elements, strides in bytes, of all dimensions but the first; the innermost comes first."""
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    encoded = check(
        driver.cuTensorMapEncodeTiled,
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bfloat16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(sizes),
        pointer,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
