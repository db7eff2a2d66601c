"""Maps that tell the copy engine of sm_90 what a matrix in memory looks like."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from cuda.bindings import driver

from engine.cuda.driver import check
from engine.tensor import Tensor, bfloat16

MAP_BYTES = 128
SWIZZLE_BYTES = 128  # of a box's row; what `operand_descriptor` in cuda_src/include/hopper.cuh expects
ALIGNMENT = 16  # of a matrix's address and of its rows


def box_map(matrix: Tensor, box_rows: int) -> bytes:
    """The map of a matrix of 16-bit floats that is copied in boxes of `box_rows` rows and 64 columns.

    A box lies in shared memory row after row, its 16-byte segments XORed with the row modulo 8; what lies
    outside the matrix reads as zeros. The columns must be a multiple of 8 and the address of 16.
    """
    rows, columns = matrix.shape
    return _encode(matrix.pointer, matrix.dtype == bfloat16, rows, columns, box_rows)


@lru_cache(maxsize=16384)
def _encode(pointer: int, is_bfloat16: bool, rows: int, columns: int, box_rows: int) -> bytes:
    types = driver.CUtensorMapDataType
    encoded = check(
        driver.cuTensorMapEncodeTiled,
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bfloat16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2,
        pointer,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns * 2)],
        [driver.cuuint32_t(SWIZZLE_BYTES // 2), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
