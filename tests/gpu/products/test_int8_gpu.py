"""Products of many rows by packed weights, both rounded to int8, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import KERNEL_FORMATS, PACKED_FORMATS, LinearWeight, WeightPart
from tessera.engine.gguf.blocks import dequantize
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.fp8.sm90 import SHARING, may_share, plans_for
from tessera.engine.ops.cuda.int8 import ops as int8_ops
from tessera.engine.ops.cuda.int8 import sm90
from tessera.engine.ops.cuda.int8.sm90 import SM90_INT8_MATMUL
from tessera.engine.ops.cuda.linear.quantize_rows import INT8_GROUP, as_integers, scratch_bytes
from tessera.engine.ops.cuda.linear.sm90 import Plan
from tessera.engine.ops.cuda.quant.blocks import launch_scales, launch_to_int8
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.tensor import CPU, bfloat16, empty, float16, float32, from_numpy, uint8
from tests.gpu.products.checks import check_recording
from tests.support.cases.gguf_blocks import extreme_blocks
from tests.support.cases.op_cases import mixed_weight, poisoned, random_array
from tests.support.references.int8_codes import Int8Codes
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu
FEW_ROWS = 16  # of these tests
MOST_OFF = 0.9  # of a weight's integers
PLAN_COLUMNS = 1024  # four groups, of which two or four splits have an equal share
MIXED = ("packed_q4_k", "packed_q6_k")


@pytest.fixture
def ops(cuda_device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    if not SM90_INT8_MATMUL.supports(cuda_device.arch):
        pytest.skip("the kernel is for sm_90a")
    monkeypatch.setattr(int8_ops, "FEW_ROWS", FEW_ROWS)
    made = CudaOps(cuda_device)
    made.rounds_many_rows = True
    return made


def normed_by_numpy(x: Array, gain: Array, cpu_ops: CpuOps) -> Array:
    out = empty(x.shape, x.dtype, CPU)
    return cpu_ops.rmsnorm(from_numpy(x, CPU), from_numpy(gain, CPU), 1e-5, out=out).numpy()


def as_int8(part: WeightPart, device: CudaDevice) -> Int8Codes:
    rows, columns = part.shape
    scales = empty((rows,), float32, device)
    launch_scales(device, part, scales)
    values = empty((rows, columns), uint8, device)
    launch_to_int8(device, part, scales, values)
    integers = values.numpy().view(np.int8).astype(np.int32)
    return Int8Codes(integers, scales.numpy().reshape(-1, 1).copy(), columns)


def weight_codes(weight: LinearWeight, device: CudaDevice) -> Int8Codes:
    parts = [as_int8(part, device) for part in weight.parts]
    integers, scales = (np.concatenate(arrays) for arrays in zip(*(part[:2] for part in parts), strict=True))
    return Int8Codes(integers, scales, parts[0].group)


def check_codes(codes: Int8Codes, numbers: Array) -> None:
    """No integer is further from its number than the kernel says, and few further than the nearest."""
    quotients = numbers.astype(np.float64) / codes.scales
    errors = np.abs(codes.integers - quotients)
    assert errors.max() <= MOST_OFF
    assert errors.mean() < 0.27, "0.25 is the mean of nearest integers"
    assert (np.abs(quotients).max(axis=1) <= 127.001).all()


@pytest.mark.parametrize("name", list(KERNEL_FORMATS))
def test_weights_as_int8(name: str, cuda_device: CudaDevice) -> None:
    for columns in (256, 2304, 4096):
        weight, numbers = mixed_weight(cuda_device, bfloat16, [KERNEL_FORMATS[name].name], [5], columns)
        codes = as_int8(weight.parts[0], cuda_device)
        check_codes(codes, numbers)
        largest = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
        assert (codes.scales >= largest * 0.9999).all()
        assert (codes.scales <= largest * 1.5).all(), "offsets are no larger here"


@pytest.mark.parametrize("name", list(PACKED_FORMATS))
def test_extreme_weights_as_int8(name: str, cuda_device: CudaDevice) -> None:
    """Rows of zeros, maxima, infinities and NaN: a scale says where a number is not finite."""
    format, columns = PACKED_FORMATS[name], 512
    block = extreme_blocks(name)
    stored = np.repeat(block, columns // format.type.block_size, axis=0).reshape(len(block), -1)
    tensors = {key: from_numpy(array, cuda_device) for key, array in format.pack(stored).items()}
    codes = as_int8(WeightPart(format, (len(stored), columns), tensors), cuda_device)
    with np.errstate(all="ignore"):
        numbers = dequantize(stored, format.type)
    finite = np.isfinite(numbers).all(axis=1)
    assert finite.any()
    np.testing.assert_array_equal(np.isfinite(codes.scales[:, 0]), finite)
    errors = np.abs(codes.integers[finite] - numbers[finite].astype(np.float64) / codes.scales[finite])
    assert errors.max() <= MOST_OFF


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(3, 256), (2, 384), (3, 4096), (300, 1152), (2, 14336)])
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
def test_rows_as_int8(
    normed: bool, rows: int, columns: int, dtype: np.dtype[Any], cuda_device: CudaDevice, cpu_ops: CpuOps
) -> None:
    """With elements far above the others, zeros, NaN and infinity."""
    x, norm = random_array(1, (rows, columns), dtype), random_array(2, (columns,), dtype)
    x[0, 5] *= 300
    x[1, : columns // 2] = 0
    if rows > 2 and not normed:
        x[2, 1], x[2, columns - 1] = np.nan, np.inf
    scratch = empty((scratch_bytes(rows, columns),), uint8, cuda_device)
    gain = from_numpy(norm, cuda_device) if normed else None
    values, scales = as_integers(cuda_device, from_numpy(x, cuda_device), gain, 1e-5, scratch)
    if normed:
        x = normed_by_numpy(x, norm, cpu_ops)
    expected = Int8Codes.of(x.astype(np.float32), INT8_GROUP)
    np.testing.assert_allclose(scales.numpy().T, expected.scales, rtol=0.01 if normed else 1e-6)
    difference = np.abs(values.numpy().view(np.int8).astype(int) - expected.integers)
    whole = np.isfinite(np.repeat(expected.scales, INT8_GROUP, axis=1)[:, :columns])
    # The norm of NumPy may differ in its last bit, and so an element of which all others depend.
    assert difference[whole].max() <= (2 if normed else 0)


# (formats, rows of each in the weight, rows of x, K): a part of a tile; several tiles; parts in two formats; groups of
# columns that end within one; k in splits; many rows.
SHAPES = [
    (("packed_q4_k",), (64,), 100, 256),
    (("packed_q6_k",), (200,), 129, 768),
    (MIXED, (96, 32), 17, 512),
    (("packed_int4group128",), (192,), 260, 384),
    (("packed_q8_0",), (48,), 33, 1152),
    (("packed_q4_k",), (16,), 20, 4096),
    (("packed_q4_k",), (192,), 1100, 512),
]


@pytest.mark.parametrize(("formats", "features", "rows", "columns"), SHAPES)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
def test_products(
    normed: bool,
    formats: tuple[str, ...],
    features: tuple[int, ...],
    rows: int,
    columns: int,
    ops: CudaOps,
    cpu_ops: CpuOps,
) -> None:
    device, dtype = ops.device, bfloat16
    weight, numbers = mixed_weight(device, dtype, list(formats), list(features), columns)
    bias = random_array(3, (len(numbers),), dtype)
    x, residual = random_array(1, (rows, columns), dtype), random_array(4, (rows, len(numbers)), dtype)
    x[0, 7] *= 100
    gain = random_array(2, (columns,), dtype)
    prologue = None
    taken = x
    if normed:
        prologue = RMSNorm(from_numpy(gain, device), 1e-5, empty(x.shape, dtype, device))
        taken = normed_by_numpy(x, gain, cpu_ops)
    exact = Int8Codes.of(taken.astype(np.float32), INT8_GROUP).product(weight_codes(weight, ops.device))
    device_x, out = from_numpy(x, device), poisoned(residual.shape, dtype, device)
    roundings = 4 if normed else 1

    plain = ops.linear(device_x, weight, prologue=prologue, out=out).numpy().copy()
    assert_close(plain, exact, dtype, roundings=roundings)
    biased = LinearWeight(weight.parts, bias=from_numpy(bias, device))
    found = ops.linear(device_x, biased, prologue=prologue, out=out).numpy()
    assert_close(found, exact + bias.astype(np.float64), dtype, roundings=roundings)
    if not normed:
        out.upload(residual)
        added = ops.linear(device_x, weight, epilogue=Accumulate(), out=out).numpy()
        assert_close(added, exact + residual.astype(np.float64), dtype)


def plans() -> list[Plan]:
    """All for PLAN_COLUMNS columns, those of blocks that share among them."""
    steps = PLAN_COLUMNS // sm90.STEP
    alone = [
        plan for plan in plans_for(groups=False, logits=False) if steps % (plan.splits * int(sm90.GROUP_STEPS)) == 0
    ]
    return alone + [replace(plan, sharing=SHARING) for plan in alone if may_share(plan)]


@pytest.mark.parametrize("plan", plans(), ids=str)
def test_every_plan(plan: Plan, ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges in both directions, added to what is there, and gated."""
    monkeypatch.setattr(sm90, "plan_of", lambda *_: plan)
    rows, features = 150, 400
    weight, _ = mixed_weight(ops.device, bfloat16, ["packed_q4_k"], [features], PLAN_COLUMNS)
    x, residual = random_array(1, (rows, PLAN_COLUMNS), bfloat16), random_array(2, (rows, features), bfloat16)
    exact = Int8Codes.of(x.astype(np.float32), INT8_GROUP).product(weight_codes(weight, ops.device))
    device_x, out = from_numpy(x, ops.device), from_numpy(residual, ops.device)
    added = ops.linear(device_x, weight, epilogue=Accumulate(), out=out).numpy()
    assert_close(added, exact + residual.astype(np.float64), bfloat16)
    gate = Activate("silu_mul", poisoned((rows, features), bfloat16, ops.device))
    half = poisoned((rows, features // 2), bfloat16, ops.device)
    gated = ops.linear(device_x, weight, epilogue=gate, out=half).numpy()
    assert_close(gated, gated_by_numpy(exact), bfloat16, roundings=2)


def gated_by_numpy(y: Array) -> Array:
    gate, up = np.split(y, 2, axis=1)
    with np.errstate(over="ignore"):
        found: Array = gate / (1 + np.exp(-gate)) * up
    return found


def test_few_rows_are_those_without(ops: CudaOps) -> None:
    weight, _ = mixed_weight(ops.device, bfloat16, ["packed_q4_k"], [64], 512)
    x = from_numpy(random_array(1, (FEW_ROWS + 1, 512), bfloat16), ops.device)

    def product(made: CudaOps, rows: int) -> Array:
        return made.linear(x[:rows], weight, out=poisoned((rows, 64), bfloat16, ops.device)).numpy()

    exact = CudaOps(ops.device)
    few, exact_few = product(ops, FEW_ROWS), product(exact, FEW_ROWS)
    many, exact_many = product(ops, FEW_ROWS + 1), product(exact, FEW_ROWS + 1)
    np.testing.assert_array_equal(few, exact_few)
    assert (many != exact_many).any(), "many rows are rounded"


@pytest.mark.parametrize(("rows", "columns", "inner"), [(70, 512, 64), (300, 256, 96)])
def test_gated_products(rows: int, columns: int, inner: int, ops: CudaOps) -> None:
    weight, _ = mixed_weight(ops.device, bfloat16, ["packed_q4_k"], [2 * inner], columns)
    x = random_array(1, (rows, columns), bfloat16)
    y = Int8Codes.of(x.astype(np.float32), INT8_GROUP).product(weight_codes(weight, ops.device))
    scratch = poisoned((rows, 2 * inner), bfloat16, ops.device)
    out = poisoned((rows, inner), bfloat16, ops.device)
    found = ops.linear(from_numpy(x, ops.device), weight, epilogue=Activate("silu_mul", scratch), out=out).numpy()
    assert_close(found, gated_by_numpy(y), bfloat16, roundings=2)


def test_a_broken_row_keeps_to_itself(ops: CudaOps) -> None:
    weight, _ = mixed_weight(ops.device, bfloat16, ["packed_q4_k"], [64], 512)
    x = random_array(1, (40, 512), bfloat16)
    whole = ops.linear(from_numpy(x, ops.device), weight, out=poisoned((40, 64), bfloat16, ops.device)).numpy().copy()
    x[3, 300], x[9, 2] = np.nan, np.inf
    found = ops.linear(from_numpy(x, ops.device), weight, out=poisoned((40, 64), bfloat16, ops.device)).numpy()
    broken = np.isin(np.arange(40), [3, 9])
    np.testing.assert_array_equal(found[~broken], whole[~broken])
    assert not np.isfinite(found[broken].astype(np.float32)).any()


@pytest.mark.parametrize("count", [17, 70])
def test_a_recorded_chain_waits(count: int, ops: CudaOps) -> None:
    """All weights become int8 in one scratch, and products may start before what is in front of them ends."""
    device, width = ops.device, 512
    weights = [
        mixed_weight(device, bfloat16, [name], [width], width)[0] for name in ("packed_q4_k", "packed_int4group128") * 2
    ]
    ops.reserve_linear(weights, np.dtype(bfloat16), count)
    norm = from_numpy(random_array(17, (width,), bfloat16), device)
    x = from_numpy(random_array(18, (count, width), bfloat16), device)
    outs = [empty((count, width), bfloat16, device) for _ in weights]
    scratch = empty((count, width), bfloat16, device)

    def run() -> None:
        for source, weight, out in zip([x, *outs], weights, outs, strict=False):
            ops.linear(source, weight, prologue=RMSNorm(norm, 1e-5, scratch), out=out)

    check_recording(run, outs, device)
