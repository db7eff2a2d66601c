"""Tensor maps made on the CPU: what the driver's `cuTensorMapEncodeTiled` does, in the format of `tensor_map.h`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from tessera.engine.cuda import tensor_map

MAGIC = 0x70614D54
FORMAT = struct.Struct("<Q4QI5I5HBBB51x")
MOST_DIMENSIONS = 5
MOST_BOX = 256  # elements of a dimension
SIZES = {  # of an element, in bytes
    driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: 2,
    driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16: 2,
    driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32: 4,
}
SWIZZLES = {
    driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE: 0,
    driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B: 32,
    driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B: 64,
    driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B: 128,
}


def encode_tiled(
    kind: Any,
    rank: int,
    address: int,
    sizes: Sequence[Any],
    strides: Sequence[Any],
    box: Sequence[Any],
    element_strides: Sequence[Any],
    interleave: Any,
    swizzle: Any,
    promotion: Any,
    fill: Any,
) -> tuple[Any, Any]:
    """As the driver's, without interleaving and steps between elements.

    Raises: ValueError where TMA cannot copy by such a map.
    """
    sizes, strides, box, steps = ([int(n) for n in numbers] for numbers in (sizes, strides, box, element_strides))
    if interleave != driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE or set(steps) != {1}:
        raise NotImplementedError("the emulation has maps of whole elements only")
    if fill != driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE:
        raise NotImplementedError("the emulation fills with zeros only")
    item, span = SIZES[kind], SWIZZLES[swizzle]
    right = (
        1 <= rank <= MOST_DIMENSIONS
        and len(sizes) == len(box) == len(steps) == rank == len(strides) + 1
        and address % 16 == 0
        and all(0 < size < 1 << 32 for size in sizes)
        and all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides)
        and all(1 <= length <= MOST_BOX for length in box)
        and box[0] * item % 16 == 0
        and (span == 0 or box[0] * item <= span)
    )
    if not right:
        raise ValueError(f"TMA has no such map: {rank=} {address=:#x} {sizes=} {strides=} {box=} {span=}")
    padded = [
        [*numbers, *[0] * (length - len(numbers))]
        for numbers, length in ((strides, MOST_DIMENSIONS - 1), (sizes, MOST_DIMENSIONS), (box, MOST_DIMENSIONS))
    ]
    encoded = FORMAT.pack(address, *padded[0], MAGIC, *padded[1], *padded[2], rank, item, span)
    buffer = ctypes.create_string_buffer(encoded, len(encoded))
    return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(buffer), buffer=buffer)


def memory_of(encoded: bytes) -> tuple[int, int]:
    """Where the matrix of a map lies, and its bytes."""
    address, *numbers = FORMAT.unpack(encoded)
    strides, sizes, rank = numbers[:4], numbers[5:10], numbers[15]
    return address, max(strides[i] * sizes[i + 1] for i in range(rank - 1))


@contextmanager
def emulated_tensor_maps() -> Iterator[None]:
    """Maps that the production code makes inside are of this format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
        tensor_map._encode.cache_clear()
        yield
    tensor_map._encode.cache_clear()
