"""The NumPy operations against float64 formulas: values, memory, refusals, independence of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats import FORMATS, Int8RowsFormat, LinearWeight
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.linear_interface import Accumulate, Activate, Activation, LayerNorm, Prologue, RMSNorm
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, Tensor, bfloat16, float16, float32, from_numpy
from tests.support.cases.op_cases import DTYPES, ElsewhereDevice, columns_of, mixed_weight, poisoned, random_array
from tests.support.references import reference
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

ROW_SHAPES = [(0, 8), (1, 1), (3, 7), (17, 64), (5, 172), (2, 1001)]

ops = CpuOps()
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensor(array: Array) -> Tensor:
    return from_numpy(np.ascontiguousarray(array), CPU)


def test_make_ops_takes_numpy_for_the_cpu() -> None:
    made = make_ops(CPU)
    assert isinstance(made, CpuOps)
    assert made.device is CPU


# -- linear ---------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("k", "n"), [(1, 1), (8, 31), (64, 172), (173, 64), (1000, 20), (600, 701)])
@pytest.mark.parametrize("m", [0, 1, 2, 7, 8, 9, 33])
def test_matmul(m: int, k: int, n: int, dtype: np.dtype[Any]) -> None:
    x, weight = random_array(1, (m, k), dtype), random_array(2, (n, k), dtype)
    bias = random_array(3, (n,), dtype)
    assert_close(ops.matmul(tensor(x), tensor(weight)).numpy(), reference.matmul(x, weight), dtype, typical=k**0.5)
    out = poisoned((m, n), float32, CPU)
    assert ops.matmul(tensor(x), tensor(weight), tensor(bias), out=out) is out
    # A float32 result was never rounded to the inputs' dtype.
    assert_close(out.numpy(), reference.matmul(x, weight, bias), float32, typical=k**0.5)


@dtypes
def test_matmul_rows_of_a_small_batch_are_what_they_are_alone(dtype: np.dtype[Any]) -> None:
    x, weight = random_array(4, (8, 300), dtype), tensor(random_array(5, (200, 300), dtype))
    together = ops.matmul(tensor(x), weight).numpy()
    for row in range(8):
        np.testing.assert_array_equal(ops.matmul(tensor(x[row : row + 1]), weight).numpy()[0], together[row])


@pytest.mark.parametrize("m", [3, 40])
def test_matmul_keeps_a_broken_row_to_itself(m: int) -> None:
    x, weight = random_array(6, (m, 64)), random_array(7, (50, 64))
    broken = x.copy()
    broken[1] = np.nan
    broken[2] = np.inf
    result = ops.matmul(tensor(broken), tensor(weight)).numpy()
    sound = [0, *range(3, m)]
    assert_close(result[sound], reference.matmul(x, weight)[sound], float32)
    assert np.isnan(result[1]).all()


def test_linear_surrounds_the_product_with_norm_and_activation() -> None:
    x, weight, bias = random_array(1, (5, 24)), random_array(2, (14, 24), scale=0.3), random_array(3, (14,))
    norm, norm_bias = random_array(4, (24,)), random_array(5, (24,))
    rms = RMSNorm(tensor(norm), 1e-5, poisoned((5, 24), float32, CPU))
    layer = LayerNorm(tensor(norm), tensor(norm_bias), 1e-5, poisoned((5, 24), float32, CPU))
    befores: dict[Prologue | None, Array] = {
        rms: reference.rmsnorm(x, norm, 1e-5),
        layer: reference.layernorm(x, norm, norm_bias, 1e-5),
        None: x,
    }
    functions: dict[Activation, Callable[[Array], Array]] = {
        "silu_mul": reference.silu_mul,
        "gelu_tanh_mul": partial(reference.gated_gelu, tanh=True),
        "gelu_erf_mul": partial(reference.gated_gelu, tanh=False),
        "gelu_tanh": partial(reference.gelu, tanh=True),
        "gelu_erf": partial(reference.gelu, tanh=False),
        "relu": lambda y: np.maximum(y, 0),
        "relu2": lambda y: np.maximum(y, 0) ** 2,
    }
    for prologue, normed in befores.items():
        product = reference.matmul(normed, weight, bias)
        made = LinearWeight.of(tensor(weight), tensor(bias))
        assert_close(ops.linear(tensor(x), made, prologue=prologue).numpy(), product, float32)
        out = tensor(product.astype(np.float32))
        assert ops.linear(tensor(x), made, prologue=prologue, epilogue=Accumulate(), out=out) is out
        assert_close(out.numpy(), 2 * product, float32)
        for name, function in functions.items():
            epilogue = Activate(name, poisoned((5, 14), float32, CPU))
            result = ops.linear(tensor(x), made, prologue=prologue, epilogue=epilogue)
            assert_close(result.numpy(), function(product), float32)


# -- weight formats -------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("m", [1, 8, 9, 40])
def test_linear_by_rows_of_several_formats(m: int, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the dequantised numbers in float64, in pieces that end within a part and at its end."""
    monkeypatch.setattr("tessera.engine.ops.cpu.linear.WIDENED_ELEMENTS", 7 * 64)
    weight, numbers = mixed_weight(CPU, dtype, ["int8_rows", "dense", "int8_rows"], [20, 31, 6], 64)
    x, bias = random_array(1, (m, 64), dtype), random_array(2, (57,), dtype)
    with_bias = LinearWeight(weight.parts, tensor(bias))
    expected = reference.matmul(x, numbers, bias)
    assert_close(ops.linear(tensor(x), with_bias).numpy(), expected, dtype)
    out = poisoned((m, 57), float32, CPU)
    assert_close(ops.linear(tensor(x), with_bias, out=out).numpy(), expected, float32)
    residual = tensor(random_array(3, (m, 57), dtype))
    total = expected + residual.numpy().astype(np.float64)
    assert_close(ops.linear(tensor(x), with_bias, epilogue=Accumulate(), out=residual).numpy(), total, dtype)


def test_int8_rows_are_within_half_a_step_of_what_they_stand_for() -> None:
    values = random_array(1, (9, 40))
    values[3], values[5, 7] = 0, 1e4
    arrays = Int8RowsFormat.quantize(values)
    numbers = Int8RowsFormat().dequantize(arrays, slice(None))
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(numbers - values) <= step / 2 * (1 + 1e-5)).all()
    assert numbers[5, 7] == pytest.approx(1e4)
    assert Int8RowsFormat().nbytes(9, 40) == sum(array.nbytes for array in arrays.values()) == 9 * 40 + 9 * 4


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_lays_out_the_tensors_it_names(name: str) -> None:
    columns = columns_of(name, 32)
    weight, _ = mixed_weight(CPU, bfloat16, [name], [6], columns)
    (part,) = weight.parts
    assert tuple(part.tensors) == part.format.tensor_names
    assert [(t.shape, t.dtype) for t in part.tensors.values()] == [tuple(t) for t in part.format.layout(6, columns)]
    assert sum(t.nbytes for t in weight.tensors()) == part.format.nbytes(6, columns)


@pytest.mark.parametrize("name", FORMATS)
def test_lookup(name: str) -> None:
    width = columns_of(name, 9)
    table, numbers = mixed_weight(CPU, float32, [name], [20], width)
    ids = np.array([3, 19, 0, -1, 20, 3, -2], np.int32)
    plain = ops.lookup(tensor(ids), table, out=poisoned((7, width), float32, CPU)).numpy()
    known = (ids >= 0) & (ids < 20)
    np.testing.assert_array_equal(plain, np.where(known[:, None], numbers[ids.clip(0, 19)], 0))
    sampled = tensor(np.array([4, 77], np.int32))
    found = ops.lookup(tensor(ids), table, sampled=sampled, out=poisoned((7, width), float32, CPU)).numpy()
    np.testing.assert_array_equal(found[3], numbers[4])
    assert not found[6].any()
    scaled = ops.lookup(tensor(ids), table, factor=0.3, out=poisoned((7, width), float32, CPU)).numpy()
    np.testing.assert_array_equal(scaled, plain * np.float32(0.3))


def test_a_weight_that_does_not_fit_is_refused() -> None:
    one, other = (mixed_weight(CPU, float32, ["int8_rows"], [4], columns)[0] for columns in (8, 16))
    with pytest.raises(TesseraError, match="differ in width"):
        LinearWeight(one.parts + other.parts)
    with pytest.raises(TesseraError, match="a bias of shape"):
        LinearWeight(one.parts, tensor(np.zeros(3, np.float32)))
    with pytest.raises(TesseraError, match="linear"):
        ops.linear(tensor(np.zeros((2, 16), np.float32)), one)
    with pytest.raises(TesseraError, match="linear"):
        ops.linear(tensor(np.zeros((2, 4), bfloat16)), LinearWeight.of(tensor(np.zeros((3, 4), np.float32))))
    odd, gate = LinearWeight.of(tensor(np.zeros((3, 4), np.float32))), tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(TesseraError, match="odd number of features"):
        ops.linear(tensor(np.zeros((2, 4), np.float32)), odd, epilogue=Activate("silu_mul", gate))


# -- norms and softmax ----------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_norms(shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    x = random_array(1, shape, dtype, 3)
    weight, bias = random_array(3, shape[1:], dtype), random_array(4, shape[1:], dtype)
    w, b = tensor(weight), tensor(bias)
    assert_close(ops.rmsnorm(tensor(x), w, 1e-5).numpy(), reference.rmsnorm(x, weight, 1e-5), dtype, floor=0.01)
    assert_close(ops.layernorm(tensor(x), w, b, 1e-5).numpy(), reference.layernorm(x, weight, bias, 1e-5), dtype)
    assert_close(ops.layernorm(tensor(x), w, None, 1e-5).numpy(), reference.layernorm(x, weight, None, 1e-5), dtype)


@dtypes
def test_a_norm_that_is_added_is_rounded_first(dtype: np.dtype[Any]) -> None:
    x, weight = random_array(1, (5, 60), dtype, 3), tensor(random_array(3, (60,), dtype))
    stream = tensor(random_array(2, (5, 60), dtype, 5))
    expected = ops.add(stream, ops.rmsnorm(tensor(x), weight, 1e-5)).numpy()
    assert ops.rmsnorm_add(tensor(x), weight, 1e-5, out=stream) is stream
    np.testing.assert_array_equal(stream.numpy(), expected)
    with pytest.raises(TesseraError, match="rmsnorm_add out"):
        ops.rmsnorm_add(tensor(x), weight, 1e-5, out=tensor(x[:4]))


@dtypes
@pytest.mark.parametrize("groups", [1, 4])
def test_norms_of_columns(groups: int, dtype: np.dtype[Any]) -> None:
    x, weight = random_array(1, (5, 60), dtype, 3), random_array(3, (32,), dtype)
    for centred, one_norm in ((False, reference.rmsnorm), (True, partial(reference.layernorm, bias=None))):
        out = ops.norm_columns(tensor(x), tensor(weight), 1e-5, first=12, groups=groups, centred=centred).numpy()
        vectors = zip(np.split(x[:, 12:44], groups, axis=1), np.split(weight, groups), strict=True)
        expected = np.concatenate([one_norm(vector, part, eps=1e-5) for vector, part in vectors], axis=1)
        assert_close(out[:, 12:44], expected, dtype, floor=0.01)
        for others in (slice(0, 12), slice(44, None)):
            np.testing.assert_array_equal(out[:, others], x[:, others])


def test_norms_of_zero_rows_rely_on_eps() -> None:
    zero, one = tensor(np.zeros((2, 5), np.float32)), tensor(np.ones(5, np.float32))
    assert not ops.rmsnorm(zero, one, 1e-6).numpy().any()
    assert not ops.layernorm(zero, one, None, 1e-6).numpy().any()


@dtypes
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_softmax(shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    x = random_array(5, shape, dtype, 6)
    result = ops.softmax(tensor(x))
    assert result.dtype == float32
    assert_close(result.numpy(), reference.softmax(x), float32, floor=0.001)
    assert_close(ops.softmax(tensor(x), log=True).numpy(), np.log(reference.softmax(x)), float32)


def test_softmax_of_huge_and_excluded_logits() -> None:
    x = tensor(np.array([[3e38, 3e38, -3e38], [-np.inf, 2, 2]], np.float32))
    np.testing.assert_allclose(ops.softmax(x).numpy(), [[0.5, 0.5, 0], [0, 0.5, 0.5]])


# -- activations ----------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 14), (17, 344)])
def test_silu_mul(shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    x = random_array(6, shape, dtype, 5)
    assert_close(ops.silu_mul(tensor(x)).numpy(), reference.silu_mul(x), dtype, floor=0.001)


@dtypes
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5, 7), (40, 1001)])
def test_gelu(shape: tuple[int, ...], tanh: bool, dtype: np.dtype[Any]) -> None:
    x = random_array(7, shape, dtype, 3)
    assert_close(ops.gelu(tensor(x), tanh=tanh).numpy(), reference.gelu(x, tanh), dtype, floor=0.001)


@dtypes
def test_relu(dtype: np.dtype[Any]) -> None:
    x = random_array(7, (3, 50), dtype, 3)
    positive = np.maximum(x.astype(np.float64), 0)
    assert_close(ops.relu(tensor(x), squared=False).numpy(), positive, dtype)
    assert_close(ops.relu(tensor(x), squared=True).numpy(), positive**2, dtype, floor=0.001)


def test_exact_gelu_keeps_its_relative_accuracy_in_the_tail() -> None:
    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    expected = reference.gelu(x, False)
    np.testing.assert_allclose(ops.gelu(tensor(x), tanh=False).numpy(), expected, rtol=1e-6)


@dtypes
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_mul(tanh: bool, dtype: np.dtype[Any]) -> None:
    gate_up = random_array(7, (5, 62), dtype, 3)
    expected = reference.gated_gelu(gate_up, tanh)
    assert_close(ops.gelu_mul(tensor(gate_up), tanh=tanh).numpy(), expected, dtype, floor=0.001)


@dtypes
def test_soft_cap(dtype: np.dtype[Any]) -> None:
    x = random_array(8, (5, 33), dtype, 40)
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    assert_close(ops.soft_cap(tensor(x), 30.0).numpy(), expected, dtype, floor=0.001)


def test_activations_of_extreme_values() -> None:
    x = np.array([[-1e30, 1e30, 0.0, np.inf, 1, 1, 1, 1]], np.float32)
    np.testing.assert_array_equal(ops.silu_mul(tensor(x)).numpy(), np.array([[0, 1e30, 0, np.inf]], np.float32))
    for tanh in (True, False):
        result = ops.gelu(tensor(np.array([-1e30, 1e30, 0, np.inf], np.float32)), tanh=tanh).numpy()
        np.testing.assert_array_equal(result, np.array([0, 1e30, 0, np.inf], np.float32))


# -- elementwise and rows -------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", [(0, 8), (1,), (3, 5, 7), (129, 65)])
def test_elementwise(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    a, b = random_array(8, shape, dtype), random_array(9, shape, dtype)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    assert_close(ops.add(tensor(a), tensor(b)).numpy(), wide_a + wide_b, dtype)
    assert_close(ops.mul(tensor(a), tensor(b)).numpy(), wide_a * wide_b, dtype, floor=0.001)
    assert_close(ops.scale(tensor(a), -0.37).numpy(), wide_a * -0.37, dtype, floor=0.001)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_copy_converts_with_one_rounding(source: np.dtype[Any], target: np.dtype[Any]) -> None:
    x = random_array(10, (5, 33), source)
    out = poisoned((5, 33), target, CPU)
    assert ops.copy(tensor(x), out) is out
    np.testing.assert_array_equal(out.numpy(), x.astype(float32).astype(target))


def test_copy_of_integers_and_of_values_too_large_for_the_target() -> None:
    ids = np.arange(7, dtype=np.int32)
    np.testing.assert_array_equal(ops.copy(tensor(ids), tensor(np.zeros(7, np.int32))).numpy(), ids)
    out = ops.copy(tensor(np.array([1e30, -1e30, np.nan], np.float32)), poisoned((3,), float16, CPU))
    np.testing.assert_array_equal(out.numpy(), np.array([np.inf, -np.inf, np.nan], np.float16))


@dtypes
def test_embedding(dtype: np.dtype[Any]) -> None:
    table = random_array(11, (20, 9), dtype)
    ids = np.array([3, 19, 0, -1, 20, 2**31 - 1, 3], np.int32)
    expected = np.where(((ids >= 0) & (ids < 20))[:, None], table[ids.clip(0, 19)], dtype.type(0))
    out = poisoned((7, 9), dtype, CPU)
    np.testing.assert_array_equal(ops.embedding(tensor(ids), tensor(table), out=out).numpy(), expected)
    assert ops.embedding(tensor(ids[:0]), tensor(table)).shape == (0, 9)
    scaled = ops.embedding(tensor(ids), tensor(table), factor=0.3)
    np.testing.assert_array_equal(scaled.numpy(), ops.scale(out, 0.3).numpy())


@dtypes
@pytest.mark.parametrize(("size", "seed"), [(1, 0), (6, 5), (1003, 2**40 + 17), (1000, 2**64 - 1)])
def test_fill_normal(size: int, seed: int, dtype: np.dtype[Any]) -> None:
    expected = np.array([reference.normal(i, seed) for i in range(size)])
    out = ops.fill_normal(poisoned((size,), dtype, CPU), std=0.3, mean=-2.0, seed=seed)
    assert_close(out.numpy(), expected * 0.3 - 2.0, dtype)


def test_fill_normal_is_one_sequence_whatever_the_shape() -> None:
    assert reference.philox4x32_10((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    values = ops.fill_normal(poisoned((3, 100_001), float32, CPU), std=1, seed=9).numpy().reshape(-1)
    for index in (262_143, 262_144, 300_002):  # around the end of a piece, and the last
        assert abs(values[index] - reference.normal(index, 9)) < 1e-5
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    np.testing.assert_array_equal(ops.fill_normal(poisoned((50,), float32, CPU), std=1, seed=9).numpy(), values[:50])


@dtypes
def test_in_place(dtype: np.dtype[Any]) -> None:
    x, b, w = random_array(12, (5, 32), dtype), random_array(13, (5, 32), dtype), random_array(14, (32,), dtype)
    calls: list[Callable[[Tensor, Tensor | None], Tensor]] = [
        lambda t, out: ops.add(t, tensor(b), out=out),
        lambda t, out: ops.add(tensor(b), t, out=out),
        lambda t, out: ops.mul(t, tensor(b), out=out),
        lambda t, out: ops.scale(t, 1.7, out=out),
        lambda t, out: ops.soft_cap(t, 1.7, out=out),
        lambda t, out: ops.gelu(t, tanh=True, out=out),
        lambda t, out: ops.gelu(t, tanh=False, out=out),
        lambda t, out: ops.relu(t, squared=True, out=out),
        lambda t, out: ops.rmsnorm(t, tensor(w), 1e-6, out=out),
        lambda t, out: ops.layernorm(t, tensor(w), None, 1e-6, out=out),
    ]
    if dtype == float32:
        calls.append(lambda t, out: ops.softmax(t, out=out))
    for call in calls:
        place = tensor(x)
        assert call(place, place) is place
        np.testing.assert_array_equal(place.numpy(), call(tensor(x), None).numpy())


# -- refusals -------------------------------------------------------------------------------------


HERE = {"x": (4, 6), "weight": (6,), "matrix": (5, 6), "ids": (4,), "narrow": (4, 5), "odd": (4, 7)}

TWO_DEVICES: dict[str, Callable[[dict[str, Tensor], Tensor], object]] = {
    "matmul": lambda t, far: ops.matmul(t["x"], far.view(4, 6)),
    "matmul out": lambda t, far: ops.matmul(t["x"], t["x"], out=far[:2].view(4, 4)),
    "rmsnorm": lambda t, far: ops.rmsnorm(t["x"], far[0], 1e-6),
    "layernorm": lambda t, far: ops.layernorm(t["x"], t["weight"], far[0], 1e-6),
    "softmax": lambda t, far: ops.softmax(far),
    "silu_mul": lambda t, far: ops.silu_mul(far),
    "linear": lambda t, far: ops.linear(t["x"], LinearWeight.of(far.view(4, 6))),
    "lookup": lambda t, far: ops.lookup(t["ids"], LinearWeight.of(far)),
    "gelu_mul": lambda t, far: ops.gelu_mul(far, tanh=True),
    "soft_cap": lambda t, far: ops.soft_cap(far, 3.0),
    "relu": lambda t, far: ops.relu(far, squared=True),
    "norm_columns": lambda t, far: ops.norm_columns(t["x"], far[0], 1e-6),
    "gelu": lambda t, far: ops.gelu(t["x"], tanh=True, out=far.view(4, 6)),
    "add": lambda t, far: ops.add(t["x"], far.view(4, 6)),
    "mul": lambda t, far: ops.mul(far.view(4, 6), t["x"]),
    "scale": lambda t, far: ops.scale(far, 2),
    "copy": lambda t, far: ops.copy(t["x"], far.view(4, 6)),
    "embedding": lambda t, far: ops.embedding(t["ids"], far),
    "fill_normal": lambda t, far: ops.fill_normal(far, std=1, seed=1),
}


@pytest.mark.parametrize("name", TWO_DEVICES)
def test_tensors_on_two_devices_are_refused_by_name(name: str) -> None:
    here = {key: tensor(np.zeros(shape, np.int32 if key == "ids" else np.float32)) for key, shape in HERE.items()}
    far = from_numpy(np.full((4, 6), 3, np.float32), ElsewhereDevice())
    if name == "matmul out":
        far = from_numpy(np.full((4, 8), 3, np.float32), ElsewhereDevice())
    with pytest.raises(TesseraError, match=r"on cuda:7, but .* on cpu"):
        TWO_DEVICES[name](here, far)
    assert (far.numpy() == 3).all()


WRONG: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "matmul inner": lambda t: ops.matmul(t["x"], t["narrow"]),
    "matmul dtype": lambda t: ops.matmul(t["x"], t["half"]),
    "matmul bias": lambda t: ops.matmul(t["x"], t["matrix"], t["weight"]),
    "matmul out": lambda t: ops.matmul(t["x"], t["matrix"], out=t["x"]),
    "matmul out dtype": lambda t: ops.matmul(t["x"], t["x"], out=t["half"]),
    "rmsnorm": lambda t: ops.rmsnorm(t["narrow"], t["weight"], 1e-6),
    "layernorm": lambda t: ops.layernorm(t["odd"], t["weight"], None, 1e-6),
    "softmax": lambda t: ops.softmax(t["ids"]),
    "silu_mul": lambda t: ops.silu_mul(t["odd"]),
    "gelu out": lambda t: ops.gelu(t["x"], tanh=True, out=t["odd"]),
    "add": lambda t: ops.add(t["x"], t["narrow"]),
    "mul dtype": lambda t: ops.mul(t["x"], t["half"]),
    "copy": lambda t: ops.copy(t["x"], t["odd"]),
    "copy of integers": lambda t: ops.copy(t["ids"], t["row"]),
    "embedding": lambda t: ops.embedding(t["row"], t["x"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_and_dtypes_are_refused_before_work(name: str) -> None:
    arrays = {key: np.full(shape, 3, np.int32 if key == "ids" else np.float32) for key, shape in HERE.items()}
    arrays["half"], arrays["row"] = np.full((4, 6), 3, bfloat16), np.full((4,), 3, np.float32)
    tensors = {key: tensor(array) for key, array in arrays.items()}
    with pytest.raises(TesseraError, match=r"do not fit|but the result is"):
        WRONG[name](tensors)
    for key, array in arrays.items():
        np.testing.assert_array_equal(tensors[key].numpy(), array)
