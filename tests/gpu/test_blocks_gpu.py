"""The quantised blocks of GGUF files on a CUDA device: packed, dequantised, looked up and multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.formats import PACKED_FORMATS, LinearWeight, PackedFormat, WeightPart
from tessera.engine.gguf import NUMBERS, dequantize, header_of, weights_of
from tessera.engine.gguf.headers import SCALES
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.tensor import Device, bfloat16, float32, from_numpy
from tests.support.gguf_blocks import extreme_blocks, random_blocks
from tests.support.op_cases import DTYPES, poisoned

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu
types = pytest.mark.parametrize("name", list(PACKED_FORMATS))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def columns_of(format: PackedFormat) -> tuple[int, ...]:
    """Widths with whole steps, and for blocks of 32 such as end within one."""
    return (256, 1280) if format.type.block_size == 256 else (32, 224, 1056)


def stored_rows(name: str, rows: int, columns: int) -> Array:
    """Random rows and, last, one of the extreme blocks."""
    type = PACKED_FORMATS[name].type
    random = random_blocks(name, (rows - 1) * columns, np.random.default_rng(rows + columns))
    extreme = np.resize(extreme_blocks(name), (columns // type.block_size, type.block_bytes))
    return np.concatenate((random, extreme)).reshape(rows, -1)


@np.errstate(all="ignore")
def bounds(name: str, stored: Array, dtype: np.dtype[Any]) -> Array:
    """Of the error of each element, as block_formats.cuh states it."""
    blocks = stored.reshape(-1, PACKED_FORMATS[name].type.block_bytes)
    factors, offsets = SCALES[name](header_of(blocks, name))
    weights = weights_of(NUMBERS[name](blocks), header_of(blocks, name), name).astype(np.float64)
    groups = weights.reshape(*factors.shape, -1)
    offset = np.zeros_like(factors) if offsets is None else offsets
    unit = 1.01 * (2.0**-8 if dtype == bfloat16 else 2.0**-11)
    subnormal = 0 if dtype == bfloat16 else 2.0**-25 * 300  # half a step of float16 for factor, offset and sum
    of_group = np.abs(groups - offset[:, :, None]) + np.abs(offset)[:, :, None] + np.abs(groups)
    return (unit * of_group + subnormal).reshape(len(stored), -1)


def part_of(format: PackedFormat, stored: Array, columns: int, device: Device) -> WeightPart:
    tensors = {name: from_numpy(array, device) for name, array in format.pack(stored).items()}
    return WeightPart(format, (len(stored), columns), tensors)


@types
def test_packing_equals_numpy(name: str, cuda_ops: CudaOps) -> None:
    format = PACKED_FORMATS[name]
    for columns in columns_of(format):
        stored = stored_rows(name, 7, columns)
        part = WeightPart.empty(format, 9, columns, cuda_ops.device)
        for tensor in part.tensors.values():
            tensor.upload(np.full(tensor.shape, 0xDEADBEEF, tensor.dtype))
        cuda_ops.pack_blocks(from_numpy(stored, cuda_ops.device), part, 2)
        for tensor, expected in zip(part.tensors.values(), format.pack(stored).values(), strict=True):
            np.testing.assert_array_equal(tensor.numpy()[2:], expected)
            assert (tensor.numpy()[:2] == 0xDEADBEEF).all()


@types
@dtypes
def test_rows_of_packed_blocks(name: str, dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    """Float32 as ggml has it, bit for bit; 16-bit types within their bound."""
    format = PACKED_FORMATS[name]
    for columns in columns_of(format):
        stored = stored_rows(name, 9, columns)
        table = LinearWeight((part_of(format, stored, columns, cuda_ops.device),))
        rows = np.array([7, 0, -1, 9, 3, 3], np.int32)
        out = poisoned((6, columns), dtype, cuda_ops.device)
        cuda_ops.lookup(from_numpy(rows, cuda_ops.device), table, out=out)
        actual, known = out.numpy().astype(np.float64), (rows >= 0) & (rows < 9)
        assert not actual[~known].any()
        expected = dequantize(stored, format.type)[rows[known]]
        if dtype == float32:
            np.testing.assert_array_equal(actual[known], expected)
        else:
            assert (np.abs(actual[known] - expected) <= bounds(name, stored, dtype)[rows[known]]).all()
        cuda_ops.lookup(from_numpy(np.array([8], np.int32), cuda_ops.device), table, out=out[:1])
        if dtype == float32:
            np.testing.assert_array_equal(out[:1].numpy(), dequantize(stored[8:], format.type))
