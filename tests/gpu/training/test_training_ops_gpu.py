"""Training operations on the GPU against the CPU; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.cuda.training import loss
from tessera.engine.ops.training.interface import AdamWStep, PackedSequences, TrainingOps
from tessera.engine.ops.training.moment_codes import CodedMoment
from tessera.engine.tensor import CPU, Device, bfloat16, empty, float16, float32, from_numpy, zeros
from tests.support.cases.op_cases import random_array
from tests.support.references.reference import assert_close

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
Function = Callable[..., Variable]
DTYPES = [float32, float16, bfloat16]


def run(f: Functions, function: Function, arrays: list[Array], upper: Array | None) -> tuple[list[Array], Array]:
    """Value and gradients, and the upper gradient of random numbers that was taken."""
    inputs = [f.variable(array) for array in arrays]
    result = function(f, *inputs)
    if upper is None:
        upper = random_array(99, result.shape, result.value.dtype)
    f.backward(result, from_numpy(upper, f.device))
    found = [result.value.numpy()]
    for variable in inputs:
        assert variable.gradient is not None
        assert variable.gradient.dtype == float32
        found.append(variable.gradient.numpy())
    return found, upper


def check(
    f: Functions, function: Function, *shapes: tuple[int, ...], dtype: Any = float32, positive: bool = False
) -> None:
    """The same as on the CPU; twice the same bits."""
    arrays = [random_array(3 + index, shape, dtype) for index, shape in enumerate(shapes)]
    if positive:
        arrays = [(np.abs(array.astype(np.float32)) + 0.5).astype(dtype) for array in arrays]
    expected, upper = run(Functions.on(CPU), function, arrays, None)
    found, _ = run(f, function, arrays, upper)
    again, _ = run(f, function, arrays, upper)
    for index, (one, other, wanted) in enumerate(zip(found, again, expected, strict=True)):
        np.testing.assert_array_equal(one, other)
        assert_near(one, wanted, dtype, f"output {index}")


def assert_near(found: Array, expected: Array, dtype: Any, name: str = "") -> None:
    """Within what rounding to `dtype` on the way makes of numbers of this size."""
    unit = {float32: 1e-5, float16: 4e-3, bfloat16: 3e-2}[dtype]
    expected = expected.astype(np.float64)
    size = float(np.abs(expected).max(initial=1e-6))
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=unit, atol=unit * size, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 264), (300, 72)])
def test_elementwise_small(training: Functions, shape: tuple[int, int], dtype: Any) -> None:
    check(training, lambda f, a, b: f.sub(a, b), shape, shape, dtype=dtype)
    check(training, lambda f, a, b: f.div(a, b), shape, shape, dtype=dtype, positive=True)
    check(training, lambda f, a, b: f.mul(a, f.add(a, b)), shape, shape, dtype=dtype)
    check(training, lambda f, x, row: f.add_row(x, row), shape, shape[1:], dtype=dtype)
    check(training, lambda f, x: f.sum(f.scale(x, -1.5)), shape, dtype=dtype)
    check(training, lambda f, x: f.view(x, shape[0] * shape[1]), shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_small(training: Functions, dtype: Any) -> None:
    check(training, lambda f, x: f.columns(x, 2, 5), (3, 7), dtype=dtype)
    check(training, lambda f, x: f.columns(x, 8, 40), (5, 72), dtype=dtype)
    check(training, lambda f, a, b: f.join_columns(a, b), (3, 16), (3, 9), dtype=dtype)
    check(training, lambda f, x, part: f.add_columns(x, part, 2, 0.5), (3, 7), (3, 2), dtype=dtype)
    check(training, lambda f, x, part: f.add_columns(x, part, 16, 0.5), (4, 2100), (4, 2064), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (5, 8), (140, 65), (300, 264)])
def test_norms_small(training: Functions, shape: tuple[int, int], dtype: Any) -> None:
    width = shape[1:]
    check(training, lambda f, x, w: f.rmsnorm(x, w, 1e-3), shape, width, dtype=dtype)
    check(training, lambda f, x, w, b: f.layernorm(x, w, b, 1e-3), shape, width, width, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 6), (9, 4112)])
def test_activations_small(training: Functions, shape: tuple[int, int], dtype: Any) -> None:
    check(training, lambda f, x: f.silu(x), shape, dtype=dtype)
    check(training, lambda f, x: f.silu_mul(x), shape, dtype=dtype)
    for tanh in (True, False):
        check(training, lambda f, x, t=tanh: f.gelu(x, tanh=t), shape, dtype=dtype)
        check(training, lambda f, x, t=tanh: f.gelu_mul(x, tanh=t), shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 1), (4, 9), (3, 130)])
def test_softmax_small(training: Functions, shape: tuple[int, int]) -> None:
    check(training, lambda f, x: f.softmax(x), shape)
    check(training, lambda f, x: f.softmax(x, log=True), shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 5, 3), (70, 40, 24), (33, 8, 130)])
def test_matmul_small(training: Functions, m: int, n: int, k: int, dtype: Any) -> None:
    check(training, lambda f, x, w: f.matmul(x, w), (m, k), (n, k), dtype=dtype)
    check(training, lambda f, x, w, b: f.matmul(x, w, b), (m, k), (n, k), (n,), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 768, 512), (2049, 16, 1024), (2048, 1024, 16), (700, 257, 640)])
def test_matmul(training: Functions, m: int, n: int, k: int, dtype: Any) -> None:
    check(training, lambda f, x, w, b: f.matmul(x, w, b), (m, k), (n, k), (n,), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradients_accumulate_small(training: Functions, dtype: Any) -> None:
    dy, x, before = (random_array(seed, shape, dtype) for seed, shape in ((1, (21, 9)), (2, (21, 16)), (3, (9, 16))))
    out = from_numpy(before.astype(np.float32), training.device)
    for _ in range(2):
        upper, rows = (from_numpy(array, training.device) for array in (dy, x))
        training.training.matmul_weight_gradient(upper, rows, out, accumulate=True)
    wide = [array.astype(np.float64) for array in (dy, x, before)]
    assert_near(out.numpy(), wide[2] + 2 * wide[0].T @ wide[1], float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(8, 5), (700, 24), (2500, 8), (3, 2072)])
def test_embedding_sums_rows_of_one_id_small(training: Functions, tokens: int, hidden: int, dtype: Any) -> None:
    """Of some ids there are more than are sorted."""
    ids = np.random.default_rng(tokens).integers(-1, 8, tokens).astype(np.int32)  # -1 and 7 name no row
    ids[: tokens // 2] = 3
    check(training, lambda f, table: f.embedding(from_numpy(ids, f.device), table), (7, hidden), dtype=dtype)


def test_embedding_of_a_large_vocabulary_is_summed_in_the_order_of_the_tokens_small(training: Functions) -> None:
    """2 ** 24 and then ones: in another order the sum would be larger."""
    vocab_size = 3001
    ids = np.random.default_rng(1).permutation(np.arange(900) % 300 * 10).astype(np.int32)
    rows = np.ones((900, 4), np.float32)
    _, first = np.unique(ids, return_index=True)
    rows[first] = 2**24
    dy, out = from_numpy(rows, training.device), zeros((vocab_size, 4), float32, training.device)
    training.training.embedding_gradient(dy, from_numpy(ids, training.device), out)
    expected = np.zeros((vocab_size, 4), np.float32)
    expected[ids] = 2**24
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary", "rotated"), [(4, 4, 3), (6, 2, 2), (16, 16, 2), (64, 32, 1)])
def test_rope_small(training: Functions, head_dim: int, rotary: int, rotated: int, dtype: Any) -> None:
    cos_sin = random_array(5, (9, rotary))  # scaled cosines and sines too
    positions = np.array([0, 5, 1, 8, 2], np.int32)

    def rope(f: Functions, x: Variable) -> Variable:
        tables = (from_numpy(array, f.device) for array in (cos_sin, positions))
        return f.rope(x, *tables, head_dim=head_dim, num_rotated=rotated)

    check(training, rope, (5, 3 * head_dim), dtype=dtype)


def check_attention(
    f: Functions, lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: Any
) -> None:
    def attention(f: Functions, qkv: Variable) -> Variable:
        packed = PackedSequences.of_lengths(lengths, f.device)
        return f.packed_attention(
            qkv, packed, num_heads=heads, num_kv_heads=kv_heads, scale=head_dim**-0.5, sliding_window=window
        )

    check(f, attention, (sum(lengths), (heads + 2 * kv_heads) * head_dim), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "window"),
    [
        ((1,), 1, 1, 2, None),
        ((5, 1, 9), 4, 2, 6, None),
        ((7, 40), 3, 1, 40, 4),
        ((70, 3), 2, 1, 32, None),
        ((3, 150), 2, 1, 64, None),
        ((140,), 2, 2, 32, 20),
        ((67, 5), 1, 1, 80, None),
        ((35,), 2, 2, 32, 1),
    ],
)
def test_attention_small(
    training: Functions,
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: Any,
) -> None:
    check_attention(training, lengths, heads, kv_heads, head_dim, window, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "window"),
    [
        ((1000, 1, 300), 8, 2, 128, None),
        ((700, 130), 6, 3, 96, 200),
        ((513,), 4, 1, 256, None),
        ((129, 640), 12, 12, 64, None),
    ],
)
def test_attention(
    training: Functions,
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: Any,
) -> None:
    check_attention(training, lengths, heads, kv_heads, head_dim, window, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences_do_not_see_one_another_small(training: Functions, dtype: Any) -> None:
    """The result and the gradient of one are, bit for bit, what they are alone."""
    qkv, upper = random_array(1, (100, 4 * 32), dtype), random_array(2, (100, 2 * 32), dtype)

    def attend(rows: slice, lengths: tuple[int, ...]) -> list[Array]:
        def attention(f: Functions, x: Variable) -> Variable:
            packed = PackedSequences.of_lengths(lengths, f.device)
            return f.packed_attention(x, packed, num_heads=2, num_kv_heads=1, scale=0.2)

        return run(training, attention, [qkv[rows]], upper[rows])[0]

    together, alone = attend(slice(0, 100), (10, 70, 20)), attend(slice(10, 80), (70,))
    for whole, part in zip(together, alone, strict=True):
        np.testing.assert_array_equal(whole[10:80], part)


def test_heads_that_no_kernel_takes_are_refused_small(training: Functions) -> None:
    qkv = training.variable(np.zeros((1, 3 * 264), np.float32))
    packed = PackedSequences.of_lengths([1], training.device)
    with pytest.raises(TesseraError, match="heads of at most 256 elements, not 264"):
        training.packed_attention(qkv, packed, num_heads=1, num_kv_heads=1, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 2), (5, 11), (300, 72), (9, 301)])
def test_cross_entropy_small(
    training: Functions, tokens: int, vocab: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 1)  # so that there are several chunks
    rng = np.random.default_rng(vocab)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    factors = rng.uniform(0.1, 1, tokens).astype(np.float32)
    if tokens > 3:
        targets[1], factors[2] = -100, 0

    def entropy(f: Functions, x: Variable, weight: Variable) -> Variable:
        tensors = (from_numpy(array, f.device) for array in (targets, factors))
        return f.linear_cross_entropy(x, weight, *tensors, multiplier=0.5)

    check(training, entropy, (tokens, 16), (vocab, 16), dtype=dtype)


def test_cross_entropy_of_large_logits_is_finite_small(training: Functions) -> None:
    x = training.variable(np.full((1, 1), 1e4, np.float32))
    weight = training.variable(np.array([[1.0], [-1.0]], np.float32))
    tensors = (
        from_numpy(np.array([1], np.int32), training.device),
        from_numpy(np.ones(1, np.float32), training.device),
    )
    result = training.linear_cross_entropy(x, weight, *tensors)
    assert result.value.numpy()[0] == 2e4
    training.backward(result)
    assert x.gradient is not None
    assert x.gradient.numpy()[0, 0] == 2


@pytest.mark.parametrize("size", [1, 13, 5000])
def test_adamw_and_norms_small(training: Functions, size: int) -> None:
    arrays = [random_array(seed, (size,)) for seed in range(4)]
    arrays[3] = np.abs(arrays[3])
    step = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, step=3, gradient_factor=0.5)

    def stepped(ops: TrainingOps, device: Device) -> list[Array]:
        weight, gradient, first, second = (from_numpy(array.copy(), device) for array in arrays)
        norm = from_numpy(np.full(1, 2, np.float32), device)
        ops.square_sum(gradient, norm)
        ops.adamw(weight, gradient, first, second, step)
        return [tensor.numpy() for tensor in (weight, gradient, first, second, norm)]

    for found, expected in zip(
        stepped(training.training, training.device), stepped(Functions.on(CPU).training, CPU), strict=True
    ):
        assert_close(found, expected, float32)


@pytest.mark.parametrize("size", [1, 255, 256, 5000])
def test_adamw_with_moments_of_eight_bits_small(training: Functions, size: int) -> None:
    gradients = [random_array(seed, (size,)) for seed in range(3)]
    gradients[1][: size // 2] = 0
    start = random_array(9, (size,))

    def stepped(f: Functions) -> list[Array]:
        weight = from_numpy(start.copy(), f.device)
        first, second = (CodedMoment.zeros(size, f.device, signed=signed) for signed in (True, False))
        for number, gradient in enumerate(gradients, 1):
            step = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, step=number, gradient_factor=0.5)
            f.training.adamw_8bit(weight, from_numpy(gradient, f.device), first, second, step)
        return [tensor.numpy() for tensor in (weight, *first, *second)]

    found, expected = stepped(training), stepped(Functions.on(CPU))
    assert_close(found[0], expected[0], float32)
    for codes, scales in ((1, 2), (3, 4)):
        np.testing.assert_allclose(found[scales], expected[scales], rtol=1e-6)
        # A share near a bound may fall on either side of it.
        apart = found[codes].view(np.uint8).astype(int) - expected[codes].view(np.uint8).astype(int)
        assert np.abs(apart).max() <= 1
        assert np.count_nonzero(apart) <= max(1, size // 500)


def test_mixed_dtypes_are_added_small(training: Functions) -> None:
    for one in DTYPES:
        for other in DTYPES:
            if float32 not in (one, other) and one != other:
                continue
            out, x = random_array(1, (11, 3), one), random_array(2, (11, 3), other)
            sums = from_numpy(out, training.device)
            training.training.add_to(sums, from_numpy(x, training.device), factor=0.5)
            assert_near(sums.numpy(), out.astype(np.float64) + 0.5 * x.astype(np.float64), one)
            filled = empty((11, 3), one, training.device)
            training.training.broadcast(from_numpy(x[0, :1], training.device), filled)
            assert_near(filled.numpy(), np.broadcast_to(x[0, 0], (11, 3)), one if one != float32 else other)


def test_zeros_are_made_on_the_device_small(training: Functions) -> None:
    table = training.variable(random_array(1, (9, 5)))
    gradient = training.zeroed_weight_gradient(table)
    assert gradient is not None
    assert not gradient.numpy().any()
