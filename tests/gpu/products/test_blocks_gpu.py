"""Packed weights on a CUDA device: blocks of GGUF and groups of safetensors, dequantised, looked up and multiplied."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.formats import KERNEL_FORMATS, PACKED_FORMATS, LinearWeight, PackedBlockFormat, WeightPart
from tessera.engine.gguf.blocks import dequantize, weights_of
from tessera.engine.gguf.headers import SCALES, header_of
from tessera.engine.gguf.numbers import NUMBERS
from tessera.engine.models.config import load_config
from tessera.engine.models.weights import quantised_source, stream
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.quant import fixed_row, product, sm90_fragments, sm90_product, sm90_row, sm90_rows
from tessera.engine.ops.cuda.quant.sm90_fragments import SM90_BLOCK_FRAGMENTS
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, Device, bfloat16, float16, float32, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.gpu.products.checks import check_recording
from tests.support.cases.gguf_blocks import extreme_blocks, random_blocks
from tests.support.cases.op_cases import DTYPES, mixed_weight, poisoned, random_array
from tests.support.cases.quantisers import SCHEMES, nf4, quantised_model
from tests.support.references import reference
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu
types = pytest.mark.parametrize("name", list(PACKED_FORMATS))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def columns_of(format: PackedBlockFormat) -> tuple[int, ...]:
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


def part_of(format: PackedBlockFormat, stored: Array, columns: int, device: Device) -> WeightPart:
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


@pytest.mark.parametrize("name", sorted(KERNEL_FORMATS.keys() - PACKED_FORMATS.keys()))
@dtypes
def test_rows_of_packed_groups(name: str, dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    """Float32 bit for bit; 16-bit types within the bound of block_formats.cuh."""
    format = KERNEL_FORMATS[name]
    unit = 1.01 * (2.0**-8 if dtype == bfloat16 else 2.0**-11)
    terms = 3 if name.startswith("Nf4") else 2
    for columns in (32, 224, 1056):
        table, numbers = mixed_weight(cuda_ops.device, dtype, [format.name], [9], columns)
        rows = np.array([7, 0, -1, 9, 3, 8], np.int32)
        known = (rows >= 0) & (rows < 9)
        out = poisoned((6, columns), dtype, cuda_ops.device)
        cuda_ops.lookup(from_numpy(rows, cuda_ops.device), table, out=out)
        actual, expected = out.numpy().astype(np.float64), numbers[rows[known]].astype(np.float64)
        assert not actual[~known].any()
        if dtype == float32:
            np.testing.assert_array_equal(actual[known], expected)
        else:
            assert (np.abs(actual[known] - expected) <= terms * unit * np.abs(expected) + 2.0**-25).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Int4Group128"])
@dtypes
def test_a_dequantised_weight_has_the_rows_that_are_looked_up(
    name: str, dtype: np.dtype[Any], cuda_ops: CudaOps
) -> None:
    """A row's steps are those of one warp, of several, and of less than one."""
    for columns in (256, 1024, 2304):
        weight, _ = mixed_weight(cuda_ops.device, dtype, [KERNEL_FORMATS[name].name], [11], columns)
        found = cuda_ops.dequantize(weight, dtype).numpy()
        np.testing.assert_array_equal(found, dequantized(cuda_ops, weight, dtype))


# Rows of x and the weight's shape: by mma, by wgmma with 64 and 128 rows a tile, k in slices, tiles cut off, dense.
ROWS_BY_SHAPE = [
    (1, 40, 1280),
    (3, 24, 1024),
    (13, 48, 2304),
    (35, 16, 512),
    (64, 304, 1280),
    (100, 528, 768),
    (300, 400, 256),
    (530, 48, 512),
]


@pytest.mark.parametrize("name", list(KERNEL_FORMATS))
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(("m", "rows", "columns"), ROWS_BY_SHAPE)
def test_products_by_packed_blocks(
    name: str, dtype: np.dtype[Any], m: int, rows: int, columns: int, cuda_ops: CudaOps, no_transfers: NoTransfers
) -> None:
    """Products of the elements that the dequantising kernel gives, with all that can stand around them; one row's of
    the exact ones, where they are integers times scales."""
    weight, exact = mixed_weight(cuda_ops.device, dtype, [KERNEL_FORMATS[name].name], [rows], columns)
    in_fixed_point = m == 1 and not name.startswith(("Fp8", "Nf4"))
    numbers = exact if in_fixed_point else dequantized(cuda_ops, weight, dtype)
    x, bias = random_array(20, (m, columns), dtype, 1 / 64), random_array(21, (rows,), dtype)
    norm = random_array(22, (columns,), dtype, 1 / 64)
    biased = LinearWeight(weight.parts, from_numpy(bias, cuda_ops.device))
    device_x, device_norm = (from_numpy(array, cuda_ops.device) for array in (x, norm))
    out, logits = (poisoned((m, rows), kind, cuda_ops.device) for kind in (dtype, float32))
    scratch, gated = (poisoned(shape, dtype, cuda_ops.device) for shape in ((m, rows), (m, rows // 2)))
    normed = poisoned(x.shape, dtype, cuda_ops.device)
    expected = reference.matmul(x, numbers, bias)
    with no_transfers():
        cuda_ops.linear(device_x, biased, out=out)
        cuda_ops.linear(device_x, biased, out=logits)
        cuda_ops.linear(device_x, weight, epilogue=Activate("silu_mul", scratch), out=gated)
    assert_close(out.numpy(), expected, dtype)
    if in_fixed_point:
        assert (np.abs(logits.numpy() - expected) <= fixed_point_bound(x, numbers)).all()
    else:
        assert_close(logits.numpy(), expected, float32, typical=1)
    assert_close(gated.numpy(), reference.silu_mul(reference.matmul(x, numbers)), dtype, roundings=2)
    with no_transfers():
        cuda_ops.linear(device_x, biased, epilogue=Accumulate(), out=out)
    assert_close(out.numpy(), 2 * expected, dtype, roundings=2)
    with no_transfers():
        cuda_ops.linear(device_x, biased, prologue=RMSNorm(device_norm, 1e-5, normed), out=out)
    after_norm = reference.rmsnorm(x, norm, 1e-5).astype(dtype)
    assert_close(out.numpy(), reference.matmul(after_norm, numbers, bias), dtype, roundings=2)


TILES = [tile for tiles in product.TILES.values() for tile in tiles]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.tokens}_{tile.units}_{tile.stages}_{tile.blocks}")
@pytest.mark.parametrize("rows", [16, 280, 17024])
def test_every_tile(tile: product.BlockTile, rows: int, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with a part of a tile, one, and several of which the last is not full; gates and ups, and neither."""
    if rows > 1000 and os.environ.get("TESSERA_EMULATED") == "1":
        pytest.skip("the emulation takes too long for so many rows")
    format, columns = KERNEL_FORMATS["Q4_K"], 1280
    if not tile.fits(format, columns, cuda_ops.device.max_shared_bytes, normed=False):
        pytest.skip("it does not fit this device")
    monkeypatch.setattr(product, "TILES", {tile.tokens: (tile,)})
    monkeypatch.setattr(product, "MAX_ROWS_TMA", 0)
    monkeypatch.setattr(product, "MIN_ROWS_SM90", 1 << 30)
    weight, exact = mixed_weight(cuda_ops.device, bfloat16, [format.name], [rows], columns)
    numbers = exact if tile.tokens == 1 else dequantized(cuda_ops, weight, bfloat16)
    x = random_array(20, (tile.tokens, columns), bfloat16, 1 / 64)
    out, scratch = (poisoned((tile.tokens, rows), bfloat16, cuda_ops.device) for _ in range(2))
    gated = poisoned((tile.tokens, rows // 2), bfloat16, cuda_ops.device)
    cuda_ops.linear(from_numpy(x, cuda_ops.device), weight, out=out)
    cuda_ops.linear(from_numpy(x, cuda_ops.device), weight, epilogue=Activate("silu_mul", scratch), out=gated)
    assert_close(out.numpy(), reference.matmul(x, numbers), bfloat16)
    assert_close(gated.numpy(), reference.silu_mul(reference.matmul(x, numbers)), bfloat16, roundings=2)


ROW_FORMATS = [name for name in KERNEL_FORMATS if not name.startswith(fixed_row.NO_INTEGERS)]


@pytest.mark.parametrize("ring_bytes", [1, 200 << 10])
@pytest.mark.parametrize("name", ROW_FORMATS)
def test_one_row_by_tma(name: str, ring_bytes: int, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of a block, the last cut off, items with fewer steps than warps, in short rings and long ones."""
    format, rows, columns = KERNEL_FORMATS[name], 16 * 9 + 8, 3072
    if not sm90_row.supports(cuda_ops.device, format, columns):
        pytest.skip("the kernel needs sm_90")
    monkeypatch.setattr(sm90_row, "RING_BYTES", ring_bytes)
    monkeypatch.setattr(sm90_row, "MIN_BITS", 0)
    monkeypatch.setattr(cuda_ops.device, "multiprocessors", 2)
    weight, exact = mixed_weight(cuda_ops.device, bfloat16, [format.name], [rows], columns)
    x, norm = random_array(20, (1, columns), bfloat16, 1 / 64), random_array(22, (columns,), bfloat16)
    device_x, device_norm = (from_numpy(array, cuda_ops.device) for array in (x, norm))
    logits, out, scratch = (poisoned((1, rows), kind, cuda_ops.device) for kind in (float32, bfloat16, bfloat16))
    gated, normed = (poisoned((1, n), bfloat16, cuda_ops.device) for n in (rows // 2, columns))
    cuda_ops.linear(device_x, weight, out=logits)
    assert (np.abs(logits.numpy() - x.astype(np.float64) @ exact.T) <= fixed_point_bound(x, exact)).all()
    expected = reference.matmul(x, exact)
    cuda_ops.linear(device_x, weight, epilogue=Activate("silu_mul", scratch), out=gated)
    assert_close(gated.numpy(), reference.silu_mul(expected), bfloat16, roundings=2)
    after_norm = reference.rmsnorm(x, norm, 1e-5).astype(bfloat16)
    cuda_ops.linear(device_x, weight, prologue=RMSNorm(device_norm, 1e-5, normed), out=out)
    assert_close(out.numpy(), reference.matmul(after_norm, exact), bfloat16, roundings=2)
    cuda_ops.linear(device_x, weight, out=out)
    cuda_ops.linear(device_x, weight, epilogue=Accumulate(), out=out)
    assert_close(out.numpy(), 2 * expected, bfloat16, roundings=2)


@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("Q4_K", bfloat16), ("Q6_K", bfloat16), ("Q4_K", float16)])
def test_a_wide_row(
    name: str, dtype: np.dtype[Any], by_tma: bool, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes into fixed point in several parts, of which the last has fewer steps, by TMA not for all warps."""
    format, rows, columns = KERNEL_FORMATS[name], 24, 36 * 256
    if by_tma and not sm90_row.supports(cuda_ops.device, format, columns):
        pytest.skip("the kernel needs sm_90")
    monkeypatch.setattr(sm90_row, "MIN_BITS", 0 if by_tma else 1 << 10)
    weight, exact = mixed_weight(cuda_ops.device, dtype, [format.name], [rows], columns)
    x, norm = random_array(20, (1, columns), dtype, 1 / 64), random_array(22, (columns,), dtype)
    device_x, device_norm = (from_numpy(array, cuda_ops.device) for array in (x, norm))
    logits, out, normed = (
        poisoned((1, width), kind, cuda_ops.device)
        for width, kind in ((rows, float32), (rows, float32), (columns, dtype))
    )
    cuda_ops.linear(device_x, weight, out=logits)
    assert (np.abs(logits.numpy() - x.astype(np.float64) @ exact.T) <= fixed_point_bound(x, exact)).all()
    cuda_ops.linear(device_x, weight, prologue=RMSNorm(device_norm, 1e-5, normed), out=out)
    after_norm = reference.rmsnorm(x, norm, 1e-5).astype(dtype)
    assert_close(out.numpy(), reference.matmul(after_norm, exact), dtype, roundings=2)


@pytest.mark.parametrize("m", [2, 8, 13])
@pytest.mark.parametrize("name", list(KERNEL_FORMATS))
def test_few_rows_by_tma(name: str, m: int, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what the kernel for more rows gives, over several tiles of a block, of which the last is cut off."""
    format, rows, columns = KERNEL_FORMATS[name], 32 * 5 + 16, 5120 if m == 8 else 3072
    if not sm90_rows.supports(cuda_ops.device, format, m, columns, normed=True):
        pytest.skip("the kernel needs sm_90")
    monkeypatch.setattr(cuda_ops.device, "multiprocessors", 2)
    monkeypatch.setattr(sm90_rows, "RING_BYTES", 1 if m == 8 else 80 << 10)
    weight, _ = mixed_weight(cuda_ops.device, bfloat16, [format.name], [rows], columns)
    x, bias = random_array(20, (m, columns), bfloat16, 1 / 64), random_array(21, (rows,), bfloat16)
    biased = LinearWeight(weight.parts, from_numpy(bias, cuda_ops.device))
    device_x, norm = (from_numpy(a, cuda_ops.device) for a in (x, random_array(22, (columns,), bfloat16)))
    results = []
    for few in (True, False):
        if not few:
            monkeypatch.setattr(product, "MAX_ROWS_TMA", 0)
        out, logits = (poisoned((m, rows), kind, cuda_ops.device) for kind in (bfloat16, float32))
        gated, scratch = (poisoned((m, n), bfloat16, cuda_ops.device) for n in (rows // 2, rows))
        cuda_ops.linear(device_x, biased, out=logits)
        cuda_ops.linear(device_x, biased, out=out)
        cuda_ops.linear(device_x, biased, epilogue=Accumulate(), out=out)
        normed = poisoned(x.shape, bfloat16, cuda_ops.device)
        prologue, epilogue = RMSNorm(norm, 1e-5, normed), Activate("silu_mul", scratch)
        cuda_ops.linear(device_x, weight, prologue=prologue, epilogue=epilogue, out=gated)
        results.append([tensor.numpy() for tensor in (out, logits, gated)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Int4Group128"])
def test_few_rows_in_slices_of_k(name: str, slices: int, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where x is too wide for one block: several tiles of a block, the last one cut off; a row as among others."""
    format, rows, columns = KERNEL_FORMATS[name], 32 * 5 + 16, 3072
    if not sm90_rows.supports(cuda_ops.device, format, 16, columns, normed=False):
        pytest.skip("the kernel needs sm_90")
    monkeypatch.setattr(cuda_ops.device, "multiprocessors", 2 * slices)
    monkeypatch.setattr(sm90_rows, "supports", lambda *_, **__: False)
    monkeypatch.setattr(sm90_rows, "count_slices", lambda *_: slices)
    weight, _ = mixed_weight(cuda_ops.device, bfloat16, [format.name], [rows], columns)
    cuda_ops.reserve_linear([weight], np.dtype(bfloat16))
    numbers = dequantized(cuda_ops, weight, bfloat16)
    x, bias = random_array(20, (13, columns), bfloat16, 1 / 64), random_array(21, (rows,), bfloat16)
    biased = LinearWeight(weight.parts, from_numpy(bias, cuda_ops.device))
    results = []
    for m in (13, 3):
        device_x = from_numpy(x[:m].copy(), cuda_ops.device)
        out, logits = (poisoned((m, rows), kind, cuda_ops.device) for kind in (bfloat16, float32))
        cuda_ops.linear(device_x, biased, out=logits)
        cuda_ops.linear(device_x, biased, out=out)
        cuda_ops.linear(device_x, biased, epilogue=Accumulate(), out=out)
        assert_close(out.numpy(), 2 * reference.matmul(x[:m], numbers, bias), bfloat16, roundings=2)
        assert_close(logits.numpy(), reference.matmul(x[:m], numbers, bias), float32, typical=1)
        results.append(logits.numpy())
    np.testing.assert_array_equal(results[0][:3], results[1])


@pytest.mark.parametrize("tile", sm90_fragments.TILES, ids=lambda tile: f"{tile.warpgroups}_{tile.tokens}")
@pytest.mark.parametrize(
    ("splits", "slices", "turned"), [(1, 1, False), (3, 1, True), (1, 1, True), (1, 2, False), (1, 3, True)]
)
def test_every_tile_of_fragments(
    tile: sm90_fragments.FragmentsTile,
    splits: int,
    slices: int,
    turned: bool,
    cuda_ops: CudaOps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles cut off on both sides, several of a block, k that ends within a step and slices of it; gates, a bias,
    sums added to what is there; rows that a kernel of its own has turned, and such that blocks turn."""
    if not SM90_BLOCK_FRAGMENTS.supports(cuda_ops.device.arch):
        pytest.skip("it is for sm_90a")
    format, columns, m, rows = KERNEL_FORMATS["Q8_0"], 672, tile.tokens + 8, 2 * tile.features + 48
    plan, gates = (sm90_fragments.FragmentsPlan(tile, splits, n, turned) for n in (slices, 1))
    asked: list[sm90_fragments.FragmentsProblem] = []

    def choose(problem: sm90_fragments.FragmentsProblem, *_: Any) -> sm90_fragments.FragmentsPlan:
        asked.append(problem)
        return plan if problem.max_slices else gates

    monkeypatch.setattr(sm90_fragments, "choose_plan", choose)
    monkeypatch.setattr(sm90_fragments, "count_clusters_at_once", lambda *_: (2 * slices,) * 8)
    monkeypatch.setattr(product, "MAX_ROWS_SM90", 2048)  # so that the room takes all slices' sums
    weight, _ = mixed_weight(cuda_ops.device, bfloat16, [format.name], [rows], columns)
    cuda_ops.reserve_linear([weight], np.dtype(bfloat16))
    numbers = dequantized(cuda_ops, weight, bfloat16)
    x, bias = random_array(20, (m, columns), bfloat16, 1 / 64), random_array(21, (rows,), bfloat16)
    device_x, biased = from_numpy(x, cuda_ops.device), LinearWeight(weight.parts, from_numpy(bias, cuda_ops.device))
    out, scratch = (poisoned((m, rows), bfloat16, cuda_ops.device) for _ in range(2))
    gated, logits = poisoned((m, rows // 2), bfloat16, cuda_ops.device), poisoned((m, rows), float32, cuda_ops.device)
    cuda_ops.linear(device_x, biased, out=out)
    cuda_ops.linear(device_x, biased, epilogue=Accumulate(), out=out)
    cuda_ops.linear(device_x, weight, out=logits)
    cuda_ops.linear(device_x, weight, epilogue=Activate("silu_mul", scratch), out=gated)
    assert [problem.max_slices >= slices for problem in asked] == [True, True, True, False]
    expected, with_bias = reference.matmul(x, numbers), reference.matmul(x, numbers, bias)
    assert_close(out.numpy(), 2 * with_bias, bfloat16, roundings=2)
    assert_close(logits.numpy(), expected, float32, typical=1)
    assert_close(gated.numpy(), reference.silu_mul(expected), bfloat16, roundings=2)


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_a_norm_that_turns_its_rows_is_the_norm(dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    """Bit for bit the product of the norm by itself, where k ends within a step, too."""
    if not SM90_BLOCK_FRAGMENTS.supports(cuda_ops.device.arch):
        pytest.skip("it is for sm_90a")
    for columns in (672, 4224):
        weight, _ = mixed_weight(cuda_ops.device, dtype, [KERNEL_FORMATS["Q8_0"].name], [80], columns)
        cuda_ops.reserve_linear([weight], np.dtype(dtype))
        x, norm = (
            from_numpy(random_array(seed, shape, dtype), cuda_ops.device)
            for seed, shape in ((20, (40, columns)), (21, (columns,)))
        )
        out, scratch = poisoned((40, 80), dtype, cuda_ops.device), poisoned(x.shape, dtype, cuda_ops.device)
        unused = scratch.numpy()
        cuda_ops.linear(x, weight, prologue=RMSNorm(norm, 1e-5, scratch), out=out)
        np.testing.assert_array_equal(scratch.numpy().view(np.uint16), unused.view(np.uint16))
        normed = cuda_ops.rmsnorm(x, norm, 1e-5)
        np.testing.assert_array_equal(out.numpy(), cuda_ops.linear(normed, weight).numpy())


@pytest.mark.parametrize("m", [20, 72])
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_a_gate_turns_its_rows_for_the_next_product(dtype: np.dtype[Any], m: int, cuda_ops: CudaOps) -> None:
    """Where the next product takes rows in no other order: the same numbers, in the order that it reads."""
    if not SM90_BLOCK_FRAGMENTS.supports(cuda_ops.device.arch):
        pytest.skip("it is for sm_90a")
    columns, inner, name = 512, 384, KERNEL_FORMATS["Q8_0"].name
    up, _ = mixed_weight(cuda_ops.device, dtype, [name], [2 * inner], columns)
    down, _ = mixed_weight(cuda_ops.device, dtype, [name], [columns], inner)
    cuda_ops.reserve_linear([up, down], np.dtype(dtype))
    x, norm = (
        from_numpy(random_array(seed, shape, dtype, 1 / 64), cuda_ops.device)
        for seed, shape in ((20, (m, columns)), (21, (columns,)))
    )
    results = []
    for next_weight in (None, down):
        scratch, normed = poisoned((m, 2 * inner), dtype, cuda_ops.device), poisoned(x.shape, dtype, cuda_ops.device)
        between, stream = poisoned((m, inner), dtype, cuda_ops.device), x.clone()
        prologue, epilogue = RMSNorm(norm, 1e-5, normed), Activate("silu_mul", scratch, next_weight)
        cuda_ops.linear(x, up, prologue=prologue, epilogue=epilogue, out=between)
        stored = between.numpy()
        cuda_ops.linear(between, down, epilogue=Accumulate(), out=stream)
        results.append((stored, stream.numpy()))
    (plain, added), (turned, added_of_turned) = results
    assert (plain != turned).any()
    np.testing.assert_array_equal(np.sort(plain, axis=1), np.sort(turned, axis=1))
    expected = x.numpy().astype(np.float64) + reference.matmul(plain, dequantized(cuda_ops, down, dtype))
    assert_close(added, expected, dtype)
    assert_close(added_of_turned, expected, dtype)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "Int4Group32", "Int4Group128", "Q5_K"])
def test_fragments_are_the_elements(name: str, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an identity give each element bit for bit, whichever power of two it was made with."""
    if not SM90_BLOCK_FRAGMENTS.supports(cuda_ops.device.arch):
        pytest.skip("it is for sm_90a")
    columns, rows = 512, 64
    plan = sm90_fragments.FragmentsPlan(sm90_fragments.FragmentsTile(2, 64))
    monkeypatch.setattr(sm90_fragments, "choose_plan", lambda *_: plan)
    weight, _ = mixed_weight(cuda_ops.device, bfloat16, [KERNEL_FORMATS[name].name], [rows], columns)
    numbers = dequantized(cuda_ops, weight, bfloat16)
    identity = np.eye(columns, dtype=np.float32)[::7].astype(bfloat16)
    out = poisoned((len(identity), rows), bfloat16, cuda_ops.device)
    cuda_ops.linear(from_numpy(identity, cuda_ops.device), weight, out=out)
    np.testing.assert_array_equal(out.numpy(), numbers.T[::7].astype(bfloat16))


@pytest.mark.parametrize(("m", "rows", "columns"), [(64, 304, 1280), (100, 528, 768), (300, 400, 256)])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Int4Group128"])
def test_products_through_a_ring_of_elements(
    name: str, m: int, rows: int, columns: int, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel whose elements pass through shared memory, where there is another."""
    monkeypatch.setattr(sm90_product, "KERNELS", (sm90_product.SM90_BLOCK_MATMUL,))
    weight, _ = mixed_weight(cuda_ops.device, bfloat16, [KERNEL_FORMATS[name].name], [rows], columns)
    numbers = dequantized(cuda_ops, weight, bfloat16)
    x = random_array(20, (m, columns), bfloat16, 1 / 64)
    out, scratch = (poisoned((m, rows), bfloat16, cuda_ops.device) for _ in range(2))
    gated = poisoned((m, rows // 2), bfloat16, cuda_ops.device)
    cuda_ops.linear(from_numpy(x, cuda_ops.device), weight, out=out)
    cuda_ops.linear(from_numpy(x, cuda_ops.device), weight, epilogue=Activate("silu_mul", scratch), out=gated)
    assert_close(out.numpy(), reference.matmul(x, numbers), bfloat16)
    assert_close(gated.numpy(), reference.silu_mul(reference.matmul(x, numbers)), bfloat16, roundings=2)


def fixed_point_bound(x: Array, weight: Array) -> Array:
    """Of the error of x [1, K] times weight^T [N, K], as block_row.cuh states it, with sums in float32."""
    x, weight = np.abs(x.astype(np.float64)), np.abs(weight.astype(np.float64))
    most = x.reshape(-1, 32).max(axis=1).repeat(32)
    return weight @ most * 2.0**-15.96 + weight @ x[0] * 2.0**-18


def test_a_single_row_keeps_small_elements_beside_large_ones(cuda_ops: CudaOps) -> None:
    """Each 32 elements have a scale of their own; what is not finite ends in no number."""
    rows, columns = 24, 1280
    weight, exact = mixed_weight(cuda_ops.device, bfloat16, ["packed_q4_k"], [rows], columns)
    x = random_array(24, (1, columns), bfloat16, 1 / 64)
    x[:, :32] *= 2.0**20
    x[:, 64:96] = 0
    x[:, 96:128] *= 2.0**-120
    for broken in (None, np.nan, np.inf):
        if broken is not None:
            x[0, 700] = broken
        out = poisoned((1, rows), float32, cuda_ops.device)
        cuda_ops.linear(from_numpy(x, cuda_ops.device), weight, out=out)
        if broken is None:
            assert (np.abs(out.numpy() - x.astype(np.float64) @ exact.T) <= fixed_point_bound(x, exact)).all()
        else:
            assert np.isnan(out.numpy()).all()


def test_products_by_parts_of_several_formats(cuda_ops: CudaOps) -> None:
    for m in (1, 5):
        names = ["packed_q4_k", "packed_q6_k", "packed_q8_0"]
        weight, _ = mixed_weight(cuda_ops.device, bfloat16, names, [24, 8, 50], 512)
        x = random_array(3, (m, 512), bfloat16)
        numbers = dequantized(cuda_ops, weight, bfloat16)
        out = poisoned((m, 82), bfloat16, cuda_ops.device)
        cuda_ops.linear(from_numpy(x, cuda_ops.device), weight, out=out)
        assert_close(out.numpy(), reference.matmul(x, numbers), bfloat16)


@pytest.mark.parametrize("m", [1, 12])
def test_a_chain_of_products_by_parts_waits(m: int, cuda_ops: CudaOps) -> None:
    """Parts are multiplied side by side, of rows that the parts before have made."""
    device, layers, width = cuda_ops.device, 4, 1024
    parts = ["packed_q4_k", "packed_q6_k"]
    weights = [mixed_weight(device, bfloat16, parts, [768, 256], width)[0] for _ in range(layers)]
    norm = from_numpy(np.ones(width, bfloat16), device)
    rows = [from_numpy(random_array(20 + i, (m, width), bfloat16), device) for i in range(layers + 1)]
    cuda_ops.reserve_linear(weights, np.dtype(bfloat16), m)
    prologue = RMSNorm(norm, 1e-5, poisoned((m, width), bfloat16, device))

    def chain() -> None:
        for i, weight in enumerate(weights):
            cuda_ops.linear(rows[i], weight, prologue=prologue, out=rows[i + 1])

    check_recording(chain, rows[1:], device)


@pytest.mark.parametrize("m", [1, 5, 70])
def test_products_by_columns_in_another_order(m: int, cuda_ops: CudaOps) -> None:
    """After a norm, before a gate, and added to what is there."""
    rows, columns = 48, 320
    weight, numbers = mixed_weight(cuda_ops.device, bfloat16, ["packed_int4group32"], [rows], columns)
    order = np.random.default_rng(4).permutation(columns).astype(np.int32)
    stored = dequantized(cuda_ops, weight, bfloat16)
    numbers = np.empty_like(stored)
    numbers[:, order] = stored
    weight = LinearWeight(weight.parts, None, from_numpy(order, cuda_ops.device))
    cuda_ops.reserve_linear([weight], bfloat16, m)
    x, norm = random_array(20, (m, columns), bfloat16, 1 / 8), random_array(22, (columns,), bfloat16)
    device_x, device_norm = (from_numpy(array, cuda_ops.device) for array in (x, norm))
    scratch, out, gated = (poisoned((m, n), bfloat16, cuda_ops.device) for n in (rows, rows, rows // 2))
    product = reference.matmul(x, numbers)
    cuda_ops.linear(device_x, weight, out=out)
    assert_close(out.numpy(), product, bfloat16)
    cuda_ops.linear(device_x, weight, epilogue=Accumulate(), out=out)
    assert_close(out.numpy(), 2 * product, bfloat16, roundings=2)
    cuda_ops.linear(device_x, weight, epilogue=Activate("silu_mul", scratch), out=gated)
    assert_close(gated.numpy(), reference.silu_mul(product), bfloat16, roundings=2)
    normed = poisoned(x.shape, bfloat16, cuda_ops.device)
    cuda_ops.linear(device_x, weight, prologue=RMSNorm(device_norm, 1e-5, normed), out=out)
    after_norm = reference.rmsnorm(x, norm, 1e-5).astype(bfloat16)
    assert_close(out.numpy(), reference.matmul(after_norm, numbers), bfloat16, roundings=2)


def dequantized(ops: CudaOps, weight: LinearWeight, dtype: np.dtype[Any]) -> Array:
    made = []
    for part in weight.parts:
        out = poisoned(part.shape, dtype, ops.device)
        rows = from_numpy(np.arange(part.shape[0], dtype=np.int32), ops.device)
        made.append(ops.lookup(rows, LinearWeight((part,)), out=out).numpy())
    return np.concatenate(made)


def test_a_file_loads_into_packed_parts(tmp_path: Path, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through staging memory that is used again; matrices of several types, and rows in another order."""
    pytest.importorskip("gguf")
    from tests.engine.gguf.quantized import quantized

    monkeypatch.setattr(stream, "STAGED_BYTES", 5000)
    path, folder = quantized(tmp_path, "Q4_K", "Q6_K", "Q8_0", "F32", "MXFP4")
    packed = load_weights(path, load_config(path), bfloat16, cuda_ops)
    exact = load_weights(folder, load_config(folder), float32, make_ops(CPU))
    formats = set()
    for one, other in zip(packed.linear_weights(), exact.linear_weights(), strict=True):
        start = 0
        for part in one.parts:
            assert other.dense is not None
            expected = other.dense.numpy()[start : start + part.shape[0]]
            arrays = {name: tensor.numpy() for name, tensor in part.tensors.items()}
            found = part.format.dequantize(arrays, slice(None))
            np.testing.assert_array_equal(found, expected if part.format.name != "dense" else expected.astype(bfloat16))
            formats.add(part.format.name)
            start += part.shape[0]
    assert formats == {"packed_q4_k", "packed_q6_k", "packed_q8_0", "packed_mxfp4", "dense"}


@pytest.mark.parametrize("name", ["w4a16-actorder", "gptq-row-8", "gptq-actorder", "awq", "fp8-channel", "w8a8", "nf4"])
def test_a_quantised_checkpoint_loads_into_packed_parts(
    name: str, tmp_path: Path, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks; what no kernel takes is dense. Scales keep 16 bits of their fraction."""
    monkeypatch.setattr(quantised_source, "CHUNK_BYTES", 700)
    scheme = SCHEMES[name] if name != "nf4" else replace(SCHEMES[name], pack=lambda w: nf4(w, w.shape[1], nested=True))
    quantised, exact = quantised_model(tmp_path, scheme)
    loaded = load_weights(quantised, load_config(quantised), bfloat16, cuda_ops)
    expected = load_weights(exact, load_config(exact), float32, make_ops(CPU))
    packed = 0
    for one, other in zip(loaded.linear_weights(), expected.linear_weights(), strict=True):
        start = 0
        order = slice(None) if one.order is None else one.order.numpy()
        for part in one.parts:
            assert other.dense is not None
            arrays = {key: tensor.numpy() for key, tensor in part.tensors.items()}
            found = part.format.dequantize(arrays, slice(None))[:, : part.shape[1]]
            rows = other.dense.numpy()[start : start + part.shape[0], order]
            np.testing.assert_allclose(found, rows, rtol=2.0**-8 if part.format.name == "dense" else 2.0**-15)
            packed += part.format.name != "dense"
            start += part.shape[0]
    assert packed >= 4 * 3
