"""Products by e4m3 weights against float64 of the same quantised numbers. Those called "small" also run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.formats import Fp8Format, LinearWeight, WeightPart
from tessera.engine.formats.fp8 import E4M3_VALUES
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.fp8 import decode, sm90, sm90_rows
from tessera.engine.ops.cuda.linear import quantize_rows
from tessera.engine.ops.cuda.linear.quantize_rows import quantized, scratch_bytes
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, Device, bfloat16, empty, float16, float32, from_numpy, uint8
from tests.gpu.conftest import NoTransfers
from tests.gpu.products.checks import check_recording
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.cases.quantisers import SCHEMES as QUANTISED
from tests.support.cases.quantisers import quantised_model
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.models.tiny_models import prompt
from tests.support.references import reference
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu
HALVES = [bfloat16, float16]
SCHEMES = {
    "rows": Fp8Format(),
    "blocks": Fp8Format(block=(128, 128)),
    "static": Fp8Format(input_scale=0.02),
}
schemes = pytest.mark.parametrize("scheme", SCHEMES)
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


@dataclass(frozen=True)
class Shape:
    """Features and width of a weight, and counts of rows that it is multiplied by."""

    n: int
    k: int
    rows: tuple[int, ...]


SHAPES = {
    # Less than a step and rests of one; odd numbers of units; few features.
    "small": Shape(80, 144, (1, 2, 9, 17, 70)),
    "small long": Shape(16, 1680, (1, 8, 16, 40)),
    "whole tiles": Shape(1024, 2048, (1, 5, 16, 33, 64, 128, 256, 1300)),
    "in turns": Shape(20_000, 1104, (1, 5, 12, 25)),  # more features than a block takes at once
    "edges": Shape(1000, 1104, (1, 3, 8, 15, 17, 31, 129, 300)),
    "features that are no multiple of 8": Shape(1010, 512, (1, 4, 16, 17, 100)),
    "many features": Shape(6144, 4096, (1, 8, 16, 24, 64, 200, 1024, 1500)),
    "long k": Shape(2048, 14336, (1, 7, 16, 20, 32, 96)),
}
cases = pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name, shape in SHAPES.items() for count in shape.rows]
)


def weight_of(format: Fp8Format, n: int, k: int, device: Device, seed: int = 1) -> tuple[WeightPart, Array]:
    """Random codes and scales, and their numbers in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x38
    scales = rng.uniform(0.5, 2, format.layout(n, k)[1].shape).astype(np.float32) * np.float32(k**-0.5 / 100)
    arrays = {"values": codes, "scales": scales}
    numbers = format.dequantize(arrays, slice(None)).astype(np.float64)
    tensors = {name: from_numpy(array, device) for name, array in arrays.items()}
    return WeightPart(format, (n, k), tensors), numbers


def rounded(format: Fp8Format, x: Array) -> Array:
    return format.input_of(x.astype(np.float32)).astype(np.float64)


def silu_mul(product: Array) -> Array:
    gate, up = np.split(product, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@schemes
@dtypes
@pytest.mark.parametrize("k", [16, 144, 1024, 16640], ids=lambda k: f"small-{k}" if k < 1024 else str(k))
def test_rows_are_quantised_bit_for_bit(scheme: str, dtype: np.dtype[Any], k: int, cuda_ops: CudaOps) -> None:
    format, device = SCHEMES[scheme], cuda_ops.device
    x = random_array(2, (7, k), dtype, 3.0)
    x[2] = 0
    x[3] *= np.asarray(1e-4, dtype)
    x[4, 5] = 20_000
    scratch = empty((scratch_bytes(*x.shape),), uint8, device)
    values, scales = quantized(device, from_numpy(x, device), None, 0.0, format, scratch)
    wide = np.repeat(scales.numpy(), 128 if format.block else k, axis=0)[:k].T
    actual = E4M3_VALUES[values.numpy()] * wide
    np.testing.assert_array_equal(actual, format.input_of(x.astype(np.float32)))


@schemes
def test_a_norm_before_quantising_small(scheme: str, cuda_ops: CudaOps) -> None:
    """With the bits of the norm's own kernel."""
    format, device, k = SCHEMES[scheme], cuda_ops.device, 400
    x, norm = from_numpy(random_array(3, (5, k), bfloat16), device), from_numpy(random_array(4, (k,), bfloat16), device)
    scratch = [empty((scratch_bytes(5, k),), uint8, device) for _ in range(2)]
    fused = quantized(device, x, norm, 1e-5, format, scratch[0])
    apart = quantized(device, cuda_ops.rmsnorm(x, norm, 1e-5), None, 0.0, format, scratch[1])
    for actual, expected in zip(fused, apart, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())


@schemes
@pytest.mark.parametrize("k", [400, 8208], ids=["small-400", "long"])
@pytest.mark.parametrize("normed", [False, True])
def test_few_rows_and_many_are_quantised_alike(
    scheme: str, k: int, normed: bool, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, though a row has more threads where there are few."""
    format, device = SCHEMES[scheme], cuda_ops.device
    x = from_numpy(random_array(19, (3, k), bfloat16), device)
    norm = from_numpy(random_array(20, (k,), bfloat16), device) if normed else None
    found = []
    for few_rows in (quantize_rows.FEW_ROWS, 0):
        monkeypatch.setattr(quantize_rows, "FEW_ROWS", few_rows)
        scratch = empty((scratch_bytes(3, k),), uint8, device)
        found.append([part.numpy().copy() for part in quantized(device, x, norm, 1e-5, format, scratch)])
    for few, many in zip(*found, strict=True):
        np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("count", [1, 3, 11], ids=lambda count: f"small-{count}")
def test_every_size_of_the_decode_kernel_adds_in_one_order(
    count: int, groups: bool, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, format = cuda_ops.device, SCHEMES["blocks" if groups else "rows"]
    n, k = 304, 1296  # several units a block and two steps a warp, with rests
    part, _ = weight_of(format, n, k, device)
    weight, x = LinearWeight((part,)), from_numpy(random_array(21, (count, k), bfloat16), device)
    norm = from_numpy(random_array(22, (k,), bfloat16), device)
    cuda_ops.reserve_linear([weight], bfloat16, count)
    prologue = RMSNorm(norm, 1e-5, empty((count, k), bfloat16, device))
    activate = Activate("silu_mul", empty((count, n), bfloat16, device))
    tokens = 1 if count == 1 else 8 if count <= 8 else 16
    results = []
    try:
        for size in decode.SIZES[tokens]:
            monkeypatch.setattr(decode, "SIZES", {tokens: (size,)})
            cuda_ops.fp8_kernels.restrict(only=["decode"])
            out, gated = poisoned((count, n), bfloat16, device), poisoned((count, n // 2), bfloat16, device)
            cuda_ops.linear(x, weight, prologue=prologue, out=out)
            if size[0] > 1:
                cuda_ops.linear(x, weight, prologue=prologue, epilogue=activate, out=gated)
            results.append((size, out.numpy().view(np.uint16), gated.numpy().view(np.uint16)))
    finally:
        monkeypatch.undo()
        cuda_ops.fp8_kernels.restrict()
    _, product, activated = results[-1]
    assert np.isfinite(product.view(bfloat16).astype(np.float32)).all()
    for size, other, other_activated in results:
        np.testing.assert_array_equal(other, product)
        if size[0] > 1:
            np.testing.assert_array_equal(other_activated, activated)


@pytest.mark.parametrize("count", [1, 11], ids=["small-1", "small-11"])
@pytest.mark.parametrize("normed", [False, True], ids=["small-plain", "small-normed"])
def test_room_for_neighbours_changes_no_bits(
    normed: bool, count: int, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, k, n = cuda_ops.device, 1296 if count == 1 else 8208, 304 if count == 1 else 48
    part, _ = weight_of(SCHEMES["rows"], n, k, device)
    weight, x = LinearWeight((part,)), from_numpy(random_array(24, (count, k), bfloat16), device)
    norm = from_numpy(random_array(25, (k,), bfloat16), device)
    prologue = RMSNorm(norm, 1e-5, empty((count, k), bfloat16, device)) if normed else None
    results = []
    try:
        for asked in (decode.launch_bytes, lambda problem, tile, *_: tile.shared_bytes(problem.in_features)):
            monkeypatch.setattr(decode, "launch_bytes", asked)
            cuda_ops.fp8_kernels.restrict(only=["decode"])
            cuda_ops.reserve_linear([weight], bfloat16, count)
            out = poisoned((count, n), bfloat16, device)
            cuda_ops.linear(x, weight, prologue=prologue, out=out)
            results.append(out.numpy().view(np.uint16))
    finally:
        monkeypatch.undo()
        cuda_ops.fp8_kernels.restrict()
    assert np.isfinite(results[0].view(bfloat16).astype(np.float32)).all()
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("gated", [False, True], ids=["small-plain", "small-gated"])
@pytest.mark.parametrize("blocks", [2, 4])
def test_blocks_that_share_a_weight_have_the_bits_of_those_that_do_not(
    blocks: int, gated: bool, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rests of rows, of features and of k; the last block of four has no rows."""
    if not sm90.SM90_FP8_MATMUL.supports(cuda_ops.device.arch):
        pytest.skip("no wgmma")
    device, format = cuda_ops.device, SCHEMES["rows"]
    count, n, k = 300, 304, 272
    part, _ = weight_of(format, n, k, device)
    weight, x = LinearWeight((part,)), from_numpy(random_array(23, (count, k), bfloat16), device)
    cuda_ops.reserve_linear([weight], bfloat16, count)
    activate = Activate("silu_mul", empty((count, n), bfloat16, device)) if gated else None
    plans = [plan for plan in sm90.plans_for(groups=False, logits=False) if sm90.may_share(plan)]
    results = []
    try:
        for plan in (plans[0], *(replace(plan, sharing=blocks) for plan in plans)):
            monkeypatch.setattr(sm90, "choose_plan", lambda *_, plan=plan, **__: plan)
            cuda_ops.fp8_kernels.restrict(only=["sm90"])
            out = poisoned((count, n // 2 if gated else n), bfloat16, device)
            cuda_ops.linear(x, weight, epilogue=activate, out=out)
            results.append(out.numpy().view(np.uint16))
    finally:
        monkeypatch.undo()
        cuda_ops.fp8_kernels.restrict()
    assert np.isfinite(results[0].view(bfloat16).astype(np.float32)).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("scheme", ["rows", "blocks"], ids=lambda scheme: f"small-{scheme}")
def test_rows_longer_than_the_ring_have_the_same_bits_in_every_tile(
    scheme: str, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sm90.SM90_FP8_MATMUL.supports(cuda_ops.device.arch):
        pytest.skip("no wgmma")
    device, format, count, n, k = cuda_ops.device, SCHEMES[scheme], 136, 200, 1296
    part, _ = weight_of(format, n, k, device)
    weight, x = LinearWeight((part,)), from_numpy(random_array(26, (count, k), bfloat16), device)
    cuda_ops.reserve_linear([weight], bfloat16, count)
    plans = [plan for plan in sm90.plans_for(groups=scheme == "blocks", logits=False) if plan.splits == 1]
    results = []
    try:
        for plan in (plans[0], plans[-2], plans[-1]):
            monkeypatch.setattr(sm90, "choose_plan", lambda *_, plan=plan, **__: plan)
            monkeypatch.setattr(sm90, "count_clusters_at_once", lambda *_: (2,))  # blocks have several tiles
            cuda_ops.fp8_kernels.restrict(only=["sm90"])
            out = from_numpy(random_array(27, (count, n), bfloat16), device)
            cuda_ops.linear(x, weight, epilogue=Accumulate(), out=out)
            results.append(out.numpy().view(np.uint16))
    finally:
        monkeypatch.undo()
        cuda_ops.fp8_kernels.restrict()
    assert np.isfinite(results[0].view(bfloat16).astype(np.float32)).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@cases
@schemes
@dtypes
def test_products(
    name: str, count: int, scheme: str, dtype: np.dtype[Any], cuda_ops: CudaOps, no_transfers: NoTransfers
) -> None:
    """Plain, with bias, added to the residual, as logits, after a norm, and with the gate."""
    format, device, shape = SCHEMES[scheme], cuda_ops.device, SHAPES[name]
    n, k = shape.n, shape.k
    part, numbers = weight_of(format, n, k, device)
    x, bias, norm = (random_array(5 + i, size, dtype) for i, size in enumerate([(count, k), (n,), (k,)]))
    residual = random_array(9, (count, n), dtype)
    device_x, device_bias, device_norm = (from_numpy(array, device) for array in (x, bias, norm))
    plain, biased = LinearWeight((part,)), LinearWeight((part,), device_bias)
    cuda_ops.reserve_linear([plain, biased], dtype, count)
    product = rounded(format, x) @ numbers.T

    out, logits, normed = (poisoned((count, n), kind, device) for kind in (dtype, float32, dtype))
    added = from_numpy(residual, device)
    prologue = RMSNorm(device_norm, 1e-5, poisoned((count, k), dtype, device))
    with no_transfers():
        cuda_ops.linear(device_x, biased, out=out)
        cuda_ops.linear(device_x, plain, out=logits)
        cuda_ops.linear(device_x, biased, epilogue=Accumulate(), out=added)
        cuda_ops.linear(device_x, plain, prologue=prologue, out=normed)
    assert_close(out.numpy(), product + bias.astype(np.float64), dtype)
    # A tensor core cuts 16 products of e4m3 to 13 bits below the largest: sums err by up to 2^-9 of a row's largest.
    assert_close(logits.numpy(), product, float16 if count > 16 else float32, floor=1 if count > 16 else 4)
    assert_close(added.numpy(), product + bias.astype(np.float64) + residual.astype(np.float64), dtype)
    after_norm = reference.rmsnorm(x, norm, 1e-5).astype(dtype)
    # A norm that rounds the other way may move an element to the next e4m3.
    assert_close(normed.numpy(), rounded(format, after_norm) @ numbers.T, bfloat16, roundings=2)

    if n % 2 == 0:
        gated = poisoned((count, n // 2), dtype, device)
        activate = Activate("silu_mul", poisoned((count, n), dtype, device))
        cuda_ops.linear(device_x, plain, epilogue=activate, out=gated)
        assert_close(gated.numpy(), silu_mul(product), dtype, roundings=3)


@contextmanager
def few_rows_in(blocks: int, ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel of few rows on sm_90a for all products, on so many blocks."""
    choose = sm90_rows.choose_plan
    try:
        monkeypatch.setattr(sm90_rows, "choose_plan", lambda problem, _, nbytes: choose(problem, blocks, nbytes))
        ops.fp8_kernels.restrict(only=["sm90_rows"])
        yield
    finally:
        monkeypatch.undo()
        ops.fp8_kernels.restrict()


def bits_of_two_rows(ops: CudaOps, weight: LinearWeight, x: Array) -> Array:
    """Of the product, the first two rows."""
    out = poisoned((len(x), weight.shape[0]), bfloat16, ops.device)
    ops.linear(from_numpy(x, ops.device), weight, out=out)
    return out.numpy()[:2].view(np.uint16)


@pytest.mark.parametrize("scheme", ["rows", "blocks"])
@pytest.mark.parametrize("count", [5, 16, 23, 32])
@pytest.mark.parametrize("blocks", [1, 2, 5, 11], ids=lambda blocks: f"small-{blocks}")
def test_blocks_of_several_rows_have_as_many_slabs_as_there_are(
    blocks: int, count: int, scheme: str, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns, where one stage has no room for all; with rests of features and of k."""
    if not sm90_rows.SM90_FP8_ROWS.supports(cuda_ops.device.arch):
        pytest.skip("no wgmma")
    device, format, n, k = cuda_ops.device, SCHEMES[scheme], 306, 656
    part, numbers = weight_of(format, n, k, device)
    weight, x, residual = (
        LinearWeight((part,)),
        random_array(28, (count, k), bfloat16),
        random_array(29, (count, n), bfloat16),
    )
    cuda_ops.reserve_linear([weight], bfloat16, count)
    added, gated = from_numpy(residual, device), poisoned((count, n // 2), bfloat16, device)
    activate = Activate("silu_mul", empty((count, n), bfloat16, device))
    with few_rows_in(blocks, cuda_ops, monkeypatch):
        cuda_ops.linear(from_numpy(x, device), weight, epilogue=Accumulate(), out=added)
        cuda_ops.linear(from_numpy(x, device), weight, epilogue=activate, out=gated)
    product = rounded(format, x) @ numbers.T
    assert_close(added.numpy(), product + residual.astype(np.float64), bfloat16)
    assert_close(gated.numpy(), silu_mul(product), bfloat16, roundings=3)


@pytest.mark.parametrize("count", [2, 16], ids=lambda count: f"small-{count}")
def test_a_rows_bits_do_not_depend_on_how_many_there_are(count: int, cuda_ops: CudaOps) -> None:
    device, n, k = cuda_ops.device, 48, 400
    part, _ = weight_of(Fp8Format(), n, k, device)
    weight, x = LinearWeight((part,)), random_array(30, (9, k), bfloat16)
    cuda_ops.reserve_linear([weight], bfloat16, 16)
    results = [bits_of_two_rows(cuda_ops, weight, rows) for rows in (x, np.resize(x, (count, k)))]
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("scheme", ["rows", "blocks"])
@pytest.mark.parametrize("count", [2, 16, 17, 32], ids=lambda count: f"small-{count}")
@pytest.mark.parametrize("blocks", [1, 19], ids=["in turns", "at once"])
def test_a_rows_bits_do_not_depend_on_the_slabs_of_a_stage(
    blocks: int, count: int, scheme: str, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows have stages of fewer slabs."""
    if not sm90_rows.SM90_FP8_ROWS.supports(cuda_ops.device.arch):
        pytest.skip("no wgmma")
    device, n, k = cuda_ops.device, 304, 336
    part, _ = weight_of(SCHEMES[scheme], n, k, device)
    weight, x = LinearWeight((part,)), random_array(30, (9, k), bfloat16)
    cuda_ops.reserve_linear([weight], bfloat16, 32)
    with few_rows_in(blocks, cuda_ops, monkeypatch):
        results = [bits_of_two_rows(cuda_ops, weight, rows) for rows in (x, np.resize(x, (count, k)))]
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("count", [1, 9, 40], ids=lambda count: f"small-{count}")
def test_parts_with_scales_of_their_own(count: int, cuda_ops: CudaOps) -> None:
    device, k = cuda_ops.device, 272
    formats = [Fp8Format(input_scale=0.02), Fp8Format(input_scale=0.03), Fp8Format(), Fp8Format(block=(128, 128))]
    parts = [weight_of(format, 24 + 8 * i, k, device, seed=i) for i, format in enumerate(formats)]
    weight = LinearWeight(tuple(part for part, _ in parts))
    x = random_array(12, (count, k), bfloat16)
    cuda_ops.reserve_linear([weight], bfloat16, count)
    out = poisoned((count, weight.shape[0]), bfloat16, device)
    cuda_ops.linear(from_numpy(x, device), weight, out=out)
    expected = [rounded(format, x) @ numbers.T for format, (_, numbers) in zip(formats, parts, strict=True)]
    for actual, part in zip(np.split(out.numpy(), np.cumsum([24, 32, 40]), axis=1), expected, strict=True):
        assert_close(actual, part, bfloat16)


@pytest.mark.parametrize("k", [40, 131], ids=lambda k: f"small-{k}")
@pytest.mark.parametrize("count", [1, 33])
def test_widths_and_schemes_that_no_product_takes_are_dequantised(count: int, k: int, cuda_ops: CudaOps) -> None:
    device = cuda_ops.device
    for format, width in ((Fp8Format(), k), (Fp8Format(rounds_input=False, block=(128, 128)), 160)):
        part, numbers = weight_of(format, 48, width, device)
        weight, x = LinearWeight((part,)), random_array(13, (count, width), bfloat16)
        cuda_ops.reserve_linear([weight], bfloat16, count)
        out = poisoned((count, 48), bfloat16, device)
        cuda_ops.linear(from_numpy(x, device), weight, out=out)
        assert_close(out.numpy(), x.astype(np.float64) @ numbers.T, bfloat16)


@schemes
@pytest.mark.parametrize("count", [1, 20], ids=lambda count: f"small-{count}")
def test_a_broken_row_keeps_to_itself(scheme: str, count: int, cuda_ops: CudaOps) -> None:
    device, format = cuda_ops.device, SCHEMES[scheme]
    part, _ = weight_of(format, 16, 144, device)
    x = random_array(14, (count, 144), bfloat16)
    x[0, 3] = np.nan
    out = poisoned((count, 16), bfloat16, device)
    weight = LinearWeight((part,))
    cuda_ops.reserve_linear([weight], bfloat16, count)
    cuda_ops.linear(from_numpy(x, device), weight, out=out)
    assert np.isnan(out.numpy().astype(np.float32)).any(1).nonzero()[0].tolist() == [0]


@schemes
@pytest.mark.parametrize("gated", [False, True])
def test_one_order_of_sums_small(scheme: str, gated: bool, cuda_ops: CudaOps) -> None:
    """With `batch_invariant` a row's bits do not depend on the number of rows."""
    device, format = cuda_ops.device, SCHEMES[scheme]
    ops = CudaOps(device, batch_invariant=True)
    part, _ = weight_of(format, 64, 400, device)
    weight, x = LinearWeight((part,)), random_array(15, (70, 400), bfloat16)
    norm = from_numpy(random_array(16, (400,), bfloat16), device)
    ops.reserve_linear([weight], bfloat16, 70)
    results = []
    for count in (1, 2, 17, 70):
        prologue = RMSNorm(norm, 1e-5, empty((count, 400), bfloat16, device))
        activate = Activate("silu_mul", empty((count, 64), bfloat16, device)) if gated else None
        out = poisoned((count, 32 if gated else 64), bfloat16, device)
        ops.linear(from_numpy(x[:count].copy(), device), weight, prologue=prologue, epilogue=activate, out=out)
        results.append(out.numpy()[0].view(np.uint16).tolist())
    assert results.count(results[0]) == len(results)


@pytest.mark.parametrize("count", [1, 9, 40])
def test_a_recorded_chain_waits(count: int, cuda_ops: CudaOps) -> None:
    """All products take turns with one scratch, and may start before the one in front of them ends."""
    device, width = cuda_ops.device, 1024
    weights = [LinearWeight((weight_of(Fp8Format(), width, width, device, seed=i)[0],)) for i in range(6)]
    cuda_ops.reserve_linear(weights, bfloat16, count)
    norm = from_numpy(random_array(17, (width,), bfloat16), device)
    x = from_numpy(random_array(18, (count, width), bfloat16), device)
    outs = [empty((count, width), bfloat16, device) for _ in weights]
    scratch = empty((count, width), bfloat16, device)

    def run() -> None:
        for source, weight, out in zip([x, *outs], weights, outs, strict=False):
            cuda_ops.linear(source, weight, prologue=RMSNorm(norm, 1e-5, scratch), out=out)

    check_recording(run, outs, device)


# Activations in blocks of 16 columns are rounded by NumPy alone.
ERRORS = {"fp8-tensor": 0.12, "fp8-channel": 0.12, "fp8-weights": 0.03, "deepseek": 0.15}


@pytest.mark.parametrize("name", ERRORS)
def test_a_small_checkpoint_computes_what_numpy_does(name: str, tmp_path: Path, cuda_ops: CudaOps) -> None:
    folder, _ = quantised_model(tmp_path, QUANTISED[name])
    on_cpu, on_cuda = (
        DecoderHarness.of(folder, ops, bfloat16, max_model_len=64).logits(prompt()) for ops in (make_ops(CPU), cuda_ops)
    )
    assert relative_error(on_cuda, on_cpu) < ERRORS[name]
    weights = load_weights(folder, load_config(folder), bfloat16, cuda_ops).linear_weights()
    found = {part.format.name for weight in weights for part in weight.parts}
    assert ("fp8" in found) == (name in ("fp8-tensor", "fp8-channel"))
