"""Descriptions of matrices in device memory from which sm_90's copy engine takes boxes."""

from __future__ import annotations

from functools import lru_cache

from cuda.bindings import driver

from engine.cuda.driver import check

SWIZZLE_BYTES = 128
ELEMENT_BYTES = 2
WHOLE = True


@lru_cache(maxsize=4096)
def tensor_map(pointer: int, shape: tuple[int, int], box_rows: int) -> bytes:
    """The map of a row-major matrix [rows, columns] of 2-byte elements at `pointer`.

    A copy moves `box_rows` (at most 256) rows of 64 columns, the 16-byte units of its lines of 128 bytes
    swizzled by the line's number modulo 8, and reads zeros beyond the matrix.

    Raises: DeviceError if the driver refuses, for example a pointer or a row not aligned to 16 bytes.
    """
    rows, columns = shape
    if WHOLE:
        lines = columns * 2 // 128
        encoded = check(
            driver.cuTensorMapEncodeTiled,
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4,
            pointer,
            [driver.cuuint64_t(size) for size in (64, 8, lines, rows // 8)],
            [driver.cuuint64_t(size) for size in (columns * 2, 128, columns * 16)],
            [driver.cuuint32_t(size) for size in (64, 8, lines, box_rows // 8)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)
    encoded = check(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        2,
        pointer,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns * ELEMENT_BYTES)],
        [driver.cuuint32_t(SWIZZLE_BYTES // ELEMENT_BYTES), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)
