"""Every CUDA operation but attention and sampling against its NumPy implementation.

Outputs are NaN beforehand, so that an element that a kernel leaves out is found, and the number of
host-device copies must stand still.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Accumulate, Activate, AddedNorm, RMSNorm
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, Tensor, bfloat16, empty, float16, float32, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.gpu.ops.shapes import FUSED_ROWS, FUSED_SHAPES, NUM_ROWS, WIDTHS
from tests.support.cases.linear_calls import norm_product, norm_product_silu_mul, product_silu_mul
from tests.support.cases.op_cases import DTYPES, mixed_weight, poisoned, random_array
from tests.support.references import reference
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

ROW_SHAPES = [(0, 8), (1, 1), (2, 8), (3, 31), (17, 64), (129, 172), (300, 1000), (7, 4096), (2, 12289)]

# Applied to each implementation, its inputs as tensors of its device.
Call = Callable[..., Tensor]


@pytest.fixture
def compare(cuda_ops: CudaOps, cpu_ops: CpuOps, no_transfers: NoTransfers) -> Callable[..., None]:
    def run(call: Call, dtype: np.dtype[Any], *arrays: Array, floor: float = 1.0, roundings: int = 1) -> None:
        """call(ops, out, *inputs) on both devices gives the same; in the inputs as well, if it writes there."""
        expected_inputs = [from_numpy(array, CPU) for array in arrays]
        expected = call(cpu_ops, None, *expected_inputs)
        inputs = [from_numpy(array, cuda_ops.device) for array in arrays]
        out = poisoned(expected.shape, expected.dtype, cuda_ops.device)
        with no_transfers():
            assert call(cuda_ops, out, *inputs) is out
        assert_close(out.numpy(), expected.numpy(), dtype, floor=floor, roundings=roundings)
        for actual_input, expected_input in zip(inputs, expected_inputs, strict=True):
            assert_close(actual_input.numpy(), expected_input.numpy(), dtype)

    return run


def test_make_ops_takes_the_kernels_for_a_cuda_device(cuda_ops: CudaOps) -> None:
    made = make_ops(cuda_ops.device)
    assert isinstance(made, CudaOps)
    assert made.device is cuda_ops.device


# -- linear ---------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def matrix(seed: int, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32).astype(dtype)


@dtypes
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("k", WIDTHS)
def test_matmul(
    k: int, n: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps, no_transfers: NoTransfers
) -> None:
    x, weight = matrix(1, NUM_ROWS[-1], k, dtype), matrix(2, n, k, dtype)
    bias = random_array(3, (n,), dtype)
    plain = cpu_ops.matmul(from_numpy(x, CPU), from_numpy(weight, CPU), out=poisoned((len(x), n), float32, CPU)).numpy()
    device_x, device_weight, device_bias = (from_numpy(array, cuda_ops.device) for array in (x, weight, bias))
    for m in NUM_ROWS:
        out, logits = (poisoned((m, n), kind, cuda_ops.device) for kind in (dtype, float32))
        with no_transfers():
            cuda_ops.matmul(device_x[:m], device_weight, device_bias, out=out)
            cuda_ops.matmul(device_x[:m], device_weight, out=logits)
        assert_close(out.numpy(), plain[:m] + bias.astype(np.float32), dtype, typical=k**0.5)
        # A float32 result of 16-bit inputs is never rounded to 16 bits.
        assert_close(logits.numpy(), plain[:m], float32, typical=k**0.5)


@dtypes
@pytest.mark.parametrize(("k", "n"), FUSED_SHAPES)
def test_fused_matmuls(k: int, n: int, dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    """With the norm before it, the activation after it, and added to the residual stream."""
    x, norm = matrix(10, FUSED_ROWS[-1], k, dtype), random_array(11, (k,), dtype)
    weight, bias = (matrix(12, n, k, dtype) / k**0.5).astype(dtype), random_array(13, (n,), dtype)

    def normed(ops: Ops, out: Tensor | None, x: Tensor, g: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return norm_product(ops, x, g, 1e-5, w, b, normed=empty(x.shape, dtype, ops.device), out=out)

    def logits(ops: Ops, out: Tensor | None, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return normed(ops, out or empty((x.shape[0], n), float32, ops.device), x, g, w, None)

    def activated(ops: Ops, out: Tensor | None, x: Tensor, w: Tensor) -> Tensor:
        return product_silu_mul(ops, x, w, gate_up=empty((x.shape[0], n), dtype, ops.device), out=out)

    def all_fused(ops: Ops, out: Tensor | None, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        scratch = empty(x.shape, dtype, ops.device), empty((x.shape[0], n), dtype, ops.device)
        return norm_product_silu_mul(ops, x, g, 1e-5, w, normed=scratch[0], gate_up=scratch[1], out=out)

    def with_gelu(ops: Ops, out: Tensor | None, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        normed, gate_up = empty(x.shape, dtype, ops.device), empty((x.shape[0], n), dtype, ops.device)
        return norm_product_silu_mul(
            ops, x, g, 1e-5, w, normed=normed, gate_up=gate_up, out=out, function="gelu_tanh_mul"
        )

    for m in FUSED_ROWS:
        compare(normed, dtype, x[:m], norm, weight, bias)
        compare(logits, dtype, x[:m], norm, weight)
        # What is not fused rounds the product before the activation, and NumPy never fuses.
        compare(activated, dtype, x[:m], weight, roundings=2)
        compare(all_fused, dtype, x[:m], norm, weight, roundings=2)
        compare(with_gelu, dtype, x[:m], norm, weight, roundings=2)


@dtypes
@pytest.mark.parametrize(("k", "n"), [(2048, 80), (1544, 70), (264, 328), (10240, 24), (8968, 40), (2056, 8)])
def test_one_row(
    k: int,
    n: int,
    dtype: np.dtype[Any],
    cuda_ops: CudaOps,
    compare: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of products whose ring takes all that a block reads or that take several tiles, and of long rows."""
    monkeypatch.setattr(cuda_ops.device, "multiprocessors", 4)  # three units of 80 features for a block
    x, norm = random_array(10, (1, k), dtype), random_array(11, (k,), dtype)
    weight = (matrix(12, n, k, dtype) / k**0.5).astype(dtype)

    def normed(ops: Ops, out: Tensor | None, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return norm_product(ops, x, g, 1e-5, w, None, normed=empty(x.shape, dtype, ops.device), out=out)

    def gated(ops: Ops, out: Tensor | None, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        scratch = empty(x.shape, dtype, ops.device), empty((1, n), dtype, ops.device)
        return norm_product_silu_mul(ops, x, g, 1e-5, w, normed=scratch[0], gate_up=scratch[1], out=out)

    compare(lambda ops, out, x, w: ops.matmul(x, w, out=out), dtype, x, weight)
    compare(normed, dtype, x, norm, weight)
    compare(gated, dtype, x, norm, weight, roundings=2)


@dtypes
@pytest.mark.parametrize("m", [1, 7, 33, 130])
@pytest.mark.parametrize(("k", "rows"), [(64, [48]), (40, [5, 8, 3]), (1000, [72, 136, 64])])
def test_linear_by_rows_of_several_formats(
    k: int, rows: list[int], m: int, dtype: np.dtype[Any], cuda_ops: CudaOps, no_transfers: NoTransfers
) -> None:
    """Products of dequantised numbers, which are rounded to the activations' dtype."""
    names = ["int8_rows", "dense", "int8_rows"][: len(rows)]
    weight, numbers = mixed_weight(cuda_ops.device, dtype, names, rows, k)
    numbers = numbers.astype(dtype)
    x, bias = random_array(20, (m, k), dtype), random_array(21, (sum(rows),), dtype)
    norm = random_array(22, (k,), dtype)
    weight = LinearWeight(weight.parts, from_numpy(bias, cuda_ops.device))
    cuda_ops.reserve_linear([weight], dtype)
    device_x, device_norm = (from_numpy(array, cuda_ops.device) for array in (x, norm))
    out, logits = (poisoned((m, sum(rows)), kind, cuda_ops.device) for kind in (dtype, float32))
    normed = poisoned(x.shape, dtype, cuda_ops.device)
    with no_transfers():
        cuda_ops.linear(device_x, weight, out=out)
        cuda_ops.linear(device_x, weight, out=logits)
    expected = reference.matmul(x, numbers, bias)
    assert_close(out.numpy(), expected, dtype)
    assert_close(logits.numpy(), expected, float32, typical=1)
    with no_transfers():
        cuda_ops.linear(device_x, weight, epilogue=Accumulate(), out=out)
    assert_close(out.numpy(), 2 * expected, dtype, roundings=2)
    cuda_ops.linear(device_x, weight, prologue=RMSNorm(device_norm, 1e-5, normed), out=out)
    assert_close(out.numpy(), reference.matmul(reference.rmsnorm(x, norm, 1e-5).astype(dtype), numbers, bias), dtype)


@pytest.mark.parametrize("m", [1, 16, 33, 200])
def test_recorded_products_wait_for_the_weights_that_are_dequantised_for_them(m: int, cuda_ops: CudaOps) -> None:
    """All take turns with one scratch; in a graph, products otherwise read weights before they wait."""
    device = cuda_ops.device
    weights = [mixed_weight(device, bfloat16, ["int8_rows", "int8_rows"], [512, 512], 1024)[0] for _ in range(4)]
    cuda_ops.reserve_linear(weights, bfloat16)
    x = from_numpy(random_array(1, (m, 1024), bfloat16), device)
    outs = [empty((m, 1024), bfloat16, device) for _ in weights]

    def run() -> None:
        for source, weight, out in zip([x, *outs], weights, outs, strict=False):
            cuda_ops.linear(source, weight, out=out)

    run()
    expected = outs[-1].numpy()
    with device.capture() as finish:
        run()
    graph = finish()
    for _ in range(5):
        for out in outs:
            out.upload(np.full(out.shape, np.nan, bfloat16))
        graph.launch()
        np.testing.assert_array_equal(outs[-1].numpy(), expected)


@dtypes
@pytest.mark.parametrize("k", [8, 31, 4100])
def test_lookup_of_quantised_rows(k: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    ids, sampled = np.array([3, 19, 0, -1, 20, 3, -2], np.int32), np.array([4, 77], np.int32)
    results = []
    for ops in (cpu_ops, cuda_ops):
        table, _ = mixed_weight(ops.device, dtype, ["int8_rows"], [20], k)
        out = poisoned((7, k), dtype, ops.device)
        tensors = (from_numpy(array, ops.device) for array in (ids, sampled))
        results.append(ops.lookup(next(tensors), table, sampled=next(tensors), out=out).numpy())
    np.testing.assert_array_equal(results[1], results[0])


@dtypes
@pytest.mark.parametrize(("k", "n"), FUSED_SHAPES)
def test_matmul_adds_to_the_residual_stream(
    k: int, n: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps, no_transfers: NoTransfers
) -> None:
    x, residual = matrix(10, FUSED_ROWS[-1], k, dtype), matrix(14, FUSED_ROWS[-1], n, dtype)
    weight, bias = (matrix(12, n, k, dtype) / k**0.5).astype(dtype), random_array(13, (n,), dtype)
    for m in FUSED_ROWS:
        for kind in {dtype, float32}:
            expected, actual = (from_numpy(residual[:m].astype(kind), ops.device) for ops in (cpu_ops, cuda_ops))
            cpu_x, cpu_weight, cpu_bias = (from_numpy(array, CPU) for array in (x[:m], weight, bias))
            cpu_ops.matmul(cpu_x, cpu_weight, cpu_bias, expected, accumulate=True)
            cuda_x, cuda_weight, cuda_bias = (from_numpy(array, cuda_ops.device) for array in (x[:m], weight, bias))
            with no_transfers():
                cuda_ops.matmul(cuda_x, cuda_weight, cuda_bias, actual, accumulate=True)
            assert_close(actual.numpy(), expected.numpy(), kind)


@dtypes
def test_matmul_of_rows_that_start_anywhere(dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    """Rows of 24 elements sliced from a tensor start at multiples of 16 bytes, rows of 25 do not."""
    for k in (24, 25):
        for m in (1, 3, 40):
            compare(
                lambda ops, out, x, w: ops.matmul(x[1:], w[1:], out=out),
                dtype,
                random_array(4, (m + 1, k), dtype),
                random_array(5, (34, k), dtype),
            )


@dtypes
def test_a_row_of_a_small_matmul_does_not_depend_on_the_others(dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    x, weight = (from_numpy(random_array(seed, (300, 512), dtype), cuda_ops.device) for seed in (6, 7))
    alone = cuda_ops.matmul(x[:1], weight).numpy()
    clusters = cuda_ops.device.compute_capability >= (9, 0)
    for m in (2, 3, 4) if dtype == float32 else (2, 5, 8, 16) if clusters else (2, 5, 8):
        np.testing.assert_array_equal(cuda_ops.matmul(x[:m], weight).numpy()[:1], alone)


@dtypes
@pytest.mark.parametrize("m", [3, 40, 150])
def test_matmul_keeps_a_broken_row_to_itself(m: int, dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    x, weight = random_array(8, (m, 64), dtype), random_array(9, (50, 64), dtype)
    broken = x.copy()
    broken[1] = np.nan
    result = cuda_ops.matmul(from_numpy(broken, cuda_ops.device), from_numpy(weight, cuda_ops.device)).numpy()
    assert np.isnan(result[1].astype(np.float32)).all()
    sound = [0, *range(2, m)]
    assert_close(result[sound], reference.matmul(x, weight)[sound], dtype)


# -- rows -----------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", [*ROW_SHAPES, (3, 40_000), (3, 40_001)])
def test_norms(shape: tuple[int, int], dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    x = random_array(1, shape, dtype, 3)
    weight, bias = random_array(3, shape[1:], dtype), random_array(4, shape[1:], dtype)
    compare(lambda ops, out, x, w: ops.rmsnorm(x, w, 1e-5, out=out), dtype, x, weight, floor=0.01)
    compare(lambda ops, out, x, w, b: ops.layernorm(x, w, b, 1e-5, out=out), dtype, x, weight, bias)
    compare(lambda ops, out, x, w: ops.layernorm(x, w, None, 1e-5, out=out), dtype, x, weight)


@dtypes
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_a_norm_that_is_added_has_the_bits_of_two_steps(
    shape: tuple[int, int], dtype: np.dtype[Any], cuda_ops: CudaOps
) -> None:
    device = cuda_ops.device
    x, weight = (
        from_numpy(random_array(1, shape, dtype, 3), device),
        from_numpy(random_array(3, shape[1:], dtype), device),
    )
    stream = from_numpy(random_array(2, shape, dtype, 5), device)
    expected = cuda_ops.add(stream, cuda_ops.rmsnorm(x, weight, 1e-5)).numpy()
    assert cuda_ops.rmsnorm_add(x, weight, 1e-5, out=stream) is stream
    np.testing.assert_array_equal(stream.numpy(), expected)
    before = from_numpy(random_array(2, shape, dtype, 5), device)
    stream = poisoned(shape, dtype, device)
    cuda_ops.rmsnorm_add(x, weight, 1e-5, stream=before, out=stream)
    np.testing.assert_array_equal(stream.numpy(), expected)
    np.testing.assert_array_equal(before.numpy(), random_array(2, shape, dtype, 5))


@dtypes
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("features", [64, 520, 2560, 6144, 6400])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_of_the_norm_of_a_sum(
    gated: bool, features: int, rows: int, dtype: np.dtype[Any], cuda_ops: CudaOps
) -> None:
    """Of a row of 16-bit elements in one kernel, which also stores the sum."""
    device, shape, columns = cuda_ops.device, (rows, features), 48
    arrays = [random_array(seed, shape, dtype, scale) for seed, scale in ((1, 3), (2, 5))]
    gains = [random_array(seed, (features,), dtype) for seed in (3, 4)]
    weight = matrix(5, columns, features, dtype)
    x, update, norm, update_norm, values = (from_numpy(array, device) for array in (*arrays, *gains, weight))
    summed, normed = (poisoned(shape, dtype, device) for _ in range(2))
    stored = LinearWeight.of(values)
    out = poisoned((rows, columns // 2 if gated else columns), dtype, device)
    gate = Activate("gelu_tanh_mul", poisoned((rows, columns), dtype, device)) if gated else None

    added = AddedNorm(update, update_norm, 1e-5, summed)
    cuda_ops.linear(x, stored, prologue=RMSNorm(norm, 1e-6, normed, added), epilogue=gate, out=out)
    expected = empty(shape, dtype, device)
    cuda_ops.rmsnorm_add(update, update_norm, 1e-5, stream=x, out=expected)
    assert_close(summed.numpy(), expected.numpy().astype(np.float32), dtype)
    again = empty(out.shape, dtype, device)
    cuda_ops.linear(summed, stored, prologue=RMSNorm(norm, 1e-6, normed), epilogue=gate, out=again)
    np.testing.assert_array_equal(out.numpy(), again.numpy())
    np.testing.assert_array_equal(x.numpy(), arrays[0])


@dtypes
@pytest.mark.parametrize("shape", [*ROW_SHAPES, (3, 151936)])
def test_softmax(shape: tuple[int, int], dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    x = random_array(5, shape, dtype, 6)
    compare(lambda ops, out, x: ops.softmax(x, out=out), float32, x, floor=0.001)
    compare(lambda ops, out, x: ops.softmax(x, log=True, out=out), float32, x)


def test_softmax_of_huge_and_excluded_logits(cuda_ops: CudaOps) -> None:
    x = from_numpy(np.array([[3e38, 3e38, -3e38], [-np.inf, 2, 2]], np.float32), cuda_ops.device)
    np.testing.assert_allclose(cuda_ops.softmax(x).numpy(), [[0.5, 0.5, 0], [0, 0.5, 0.5]], rtol=1e-6)


@dtypes
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_activations(shape: tuple[int, int], dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    x, pair = random_array(6, shape, dtype, 3), random_array(7, (shape[0], 2 * shape[1]), dtype, 5)
    compare(lambda ops, out, x: ops.silu_mul(x, out=out), dtype, pair, floor=0.001)
    for tanh in (True, False):
        compare(lambda ops, out, x, tanh=tanh: ops.gelu_mul(x, tanh=tanh, out=out), dtype, pair, floor=0.001)
    compare(lambda ops, out, x: ops.gelu(x, tanh=True, out=out), dtype, x, floor=0.01)
    compare(lambda ops, out, x: ops.gelu(x, tanh=False, out=out), dtype, x, floor=0.01)
    for squared in (True, False):
        compare(lambda ops, out, x, squared=squared: ops.relu(x, squared=squared, out=out), dtype, x, floor=0.01)


@dtypes
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("width", "first", "groups", "size"), [(60, 12, 1, 32), (61, 7, 4, 13), (384, 128, 2, 64), (9000, 0, 1, 8192)]
)
def test_norms_of_columns(
    width: int,
    first: int,
    groups: int,
    size: int,
    centred: bool,
    dtype: np.dtype[Any],
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
) -> None:
    x, weight = random_array(6, (5, width), dtype, 3), random_array(7, (groups * size,), dtype)
    actual, expected = (
        ops.norm_columns(
            from_numpy(x, ops.device),
            from_numpy(weight, ops.device),
            1e-5,
            first=first,
            groups=groups,
            centred=centred,
        ).numpy()
        for ops in (cuda_ops, cpu_ops)
    )
    assert_close(actual, expected, dtype)


def test_activations_of_extreme_values(cuda_ops: CudaOps) -> None:
    pair = np.array([[-1e30, 1e30, 0.0, np.inf, 1, 1, 1, 1]], np.float32)
    result = cuda_ops.silu_mul(from_numpy(pair, cuda_ops.device)).numpy()
    np.testing.assert_array_equal(result, np.array([[0, 1e30, 0, np.inf]], np.float32))
    x = from_numpy(np.array([-1e30, 1e30, 0, np.inf], np.float32), cuda_ops.device)
    for tanh in (True, False):
        result = cuda_ops.gelu(x, tanh=tanh).numpy()
        np.testing.assert_array_equal(result, np.array([0, 1e30, 0, np.inf], np.float32))


# -- elementwise ----------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", [(0, 8), (1,), (7,), (3, 5, 7), (129, 65), (300, 1024)])
def test_elementwise(shape: tuple[int, ...], dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    a, b = random_array(8, shape, dtype), random_array(9, shape, dtype)
    compare(lambda ops, out, a, b: ops.add(a, b, out=out), dtype, a, b, floor=0.001)
    compare(lambda ops, out, a, b: ops.mul(a, b, out=out), dtype, a, b, floor=0.001)
    compare(lambda ops, out, a: ops.scale(a, -0.37, out=out), dtype, a, floor=0.001)
    compare(lambda ops, out, a: ops.soft_cap(a, 0.7, out=out), dtype, a, floor=0.001)


@dtypes
def test_elementwise_on_rows_that_start_anywhere(dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    a, b = random_array(10, (40, 33), dtype), random_array(11, (40, 33), dtype)
    compare(lambda ops, out, a, b: ops.add(a[1:], b[:39], out=out), dtype, a, b, floor=0.001)
    compare(lambda ops, out, a, b: ops.mul(a[3:], b[2:39], out=out), dtype, a, b, floor=0.001)


@dtypes
def test_in_place(dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    x, other = random_array(12, (37, 65), dtype), random_array(13, (37, 65), dtype)
    calls: list[Callable[[Ops, Tensor, Tensor], Tensor]] = [
        lambda ops, t, b: ops.add(t, b, out=t),
        lambda ops, t, b: ops.mul(t, b, out=t),
        lambda ops, t, b: ops.scale(t, 1.7, out=t),
    ]
    for call in calls:
        expected = call(cpu_ops, from_numpy(x, CPU), from_numpy(other, CPU))
        place = from_numpy(x, cuda_ops.device)
        assert call(cuda_ops, place, from_numpy(other, cuda_ops.device)) is place
        assert_close(place.numpy(), expected.numpy(), dtype)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_copy_converts_with_one_rounding(
    source: np.dtype[Any], target: np.dtype[Any], cuda_ops: CudaOps, no_transfers: NoTransfers
) -> None:
    for shape in ((0, 3), (1,), (5, 33), (64, 1024)):
        x = random_array(14, shape, source)
        out, original = poisoned(shape, target, cuda_ops.device), from_numpy(x, cuda_ops.device)
        with no_transfers():
            assert cuda_ops.copy(original, out) is out
        np.testing.assert_array_equal(out.numpy(), x.astype(float32).astype(target))


def test_copy_of_integers_and_of_values_too_large_for_the_target(cuda_ops: CudaOps) -> None:
    ids = np.arange(7, dtype=np.int32)
    out = cuda_ops.copy(from_numpy(ids, cuda_ops.device), from_numpy(ids * 0, cuda_ops.device))
    np.testing.assert_array_equal(out.numpy(), ids)
    large = from_numpy(np.array([1e30, -1e30, np.nan], np.float32), cuda_ops.device)
    out = cuda_ops.copy(large, poisoned((3,), float16, cuda_ops.device))
    np.testing.assert_array_equal(out.numpy(), np.array([np.inf, -np.inf, np.nan], np.float16))


@dtypes
@pytest.mark.parametrize("width", [1, 9, 64, 1000])
def test_embedding(width: int, dtype: np.dtype[Any], cuda_ops: CudaOps, no_transfers: NoTransfers) -> None:
    table = random_array(15, (20, width), dtype)
    ids = np.array([3, 19, 0, -1, 20, 2**31 - 1, -(2**31), 3], np.int32)
    expected = np.where(((ids >= 0) & (ids < 20))[:, None], table[ids.clip(0, 19)], dtype.type(0))
    out = poisoned(expected.shape, dtype, cuda_ops.device)
    device_ids, device_table = (from_numpy(array, cuda_ops.device) for array in (ids, table))
    with no_transfers():
        cuda_ops.embedding(device_ids, device_table, out=out)
    np.testing.assert_array_equal(out.numpy(), expected)
    assert cuda_ops.embedding(device_ids[:0], device_table).shape == (0, width)
    scaled = cuda_ops.embedding(device_ids, device_table, factor=0.3)
    np.testing.assert_array_equal(scaled.numpy(), cuda_ops.scale(out, 0.3).numpy())


@dtypes
@pytest.mark.parametrize(("size", "seed"), [(1, 0), (6, 5), (1003, 2**40 + 17), (300_001, 2**64 - 1)])
def test_fill_normal(size: int, seed: int, dtype: np.dtype[Any], compare: Callable[..., None]) -> None:
    def fill(ops: Ops, out: Tensor | None) -> Tensor:
        target = out or poisoned((size,), dtype, ops.device)
        return ops.fill_normal(target, std=0.3, mean=-2.0, seed=seed)

    compare(fill, dtype)


# -- refusals -------------------------------------------------------------------------------------


def test_tensors_on_two_devices_are_refused_by_name(cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    here = from_numpy(random_array(16, (4, 6)), CPU)
    there = here.to(cuda_ops.device)
    calls: list[Callable[[Ops, Tensor, Tensor], Tensor]] = [
        lambda ops, own, far: ops.matmul(own, far),
        lambda ops, own, far: ops.rmsnorm(own, far[0], 1e-6),
        lambda ops, own, far: ops.add(own, far),
        lambda ops, own, far: ops.copy(own, far),
        lambda ops, own, far: ops.softmax(own, out=far),
        lambda ops, own, far: ops.silu_mul(far),
    ]
    for call in calls:
        with pytest.raises(TesseraError, match=r"on cpu, but .* on cuda:0"):
            call(cuda_ops, there, here)
        with pytest.raises(TesseraError, match=r"on cuda:0, but .* on cpu"):
            call(cpu_ops, here, there)
