"""Every backward against central differences in float64, and the tape that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tessera.engine.autograd.arrays import value_and_gradients
from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.tensor import CPU, bfloat16, from_numpy
from tests.support.references import gradients

Array = np.ndarray[Any, Any]
SEED = int(np.random.SeedSequence().generate_state(1)[0])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng([SEED, *request.node.name.encode()])


def check(
    rng: np.random.Generator,
    function: Callable[..., Variable],
    reference: Callable[..., Array],
    *shapes: tuple[int, ...],
    positive: bool = False,
) -> None:
    """Value and gradients by every input of `shapes`, with a random gradient of the result."""
    arrays: list[Array] = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    if positive:
        arrays = [np.abs(array) + np.float32(0.5) for array in arrays]
    f = Functions.on(CPU)
    variables = [f.variable(array) for array in arrays]
    result = function(f, *variables)
    expected = reference(*(array.astype(np.float64) for array in arrays))
    np.testing.assert_allclose(result.value.numpy(), expected, rtol=1e-4, atol=1e-4)
    upper = rng.normal(size=result.shape).astype(np.float32)
    f.backward(result, from_numpy(upper, CPU))
    differences = gradients.central_differences(reference, arrays, upper, rng)
    for variable, (places, slopes) in zip(variables, differences, strict=True):
        assert variable.gradient is not None
        assert variable.gradient.shape == variable.shape
        atol = 2e-4 * max(float(np.abs(slopes).max()), 1.0)
        np.testing.assert_allclose(variable.gradient.numpy().reshape(-1)[places], slopes, rtol=1e-3, atol=atol)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 5, 3), (13, 33, 17)])
def test_matmul(m: int, n: int, k: int, rng: np.random.Generator) -> None:
    check(rng, lambda f, x, w: f.matmul(x, w), lambda x, w: x @ w.T, (m, k), (n, k))
    check(rng, lambda f, x, w, b: f.matmul(x, w, b), lambda x, w, b: x @ w.T + b, (m, k), (n, k), (n,))


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 12)])
def test_elementwise(shape: tuple[int, int], rng: np.random.Generator) -> None:
    check(rng, lambda f, a, b: f.add(a, b), lambda a, b: a + b, shape, shape)
    check(rng, lambda f, a, b: f.sub(a, b), lambda a, b: a - b, shape, shape)
    check(rng, lambda f, a, b: f.mul(a, b), lambda a, b: a * b, shape, shape)
    check(rng, lambda f, a, b: f.div(a, b), lambda a, b: a / b, shape, shape, positive=True)
    check(rng, lambda f, x, row: f.add_row(x, row), lambda x, row: x + row, shape, shape[1:])
    check(rng, lambda f, x: f.scale(x, -1.5), lambda x: x * -1.5, shape)
    check(rng, lambda f, x: f.sum(x), lambda x: x.sum(keepdims=True).reshape(1), shape)
    check(rng, lambda f, x: f.view(x, shape[0] * shape[1]), lambda x: x.reshape(-1), shape)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((5, 7), (7,)),
        ((5, 7), (5, 1)),
        ((5, 7), (1,)),
        ((1, 7), (5, 1)),
        ((7,), (5, 7)),
        ((2, 3, 4), (3, 1)),
        ((), (3,)),
    ],
)
def test_shapes_are_broadcast(one: tuple[int, ...], other: tuple[int, ...], rng: np.random.Generator) -> None:
    check(rng, lambda f, a, b: f.add(a, b), lambda a, b: a + b, one, other)
    check(rng, lambda f, a, b: f.sub(a, b), lambda a, b: a - b, one, other)
    check(rng, lambda f, a, b: f.mul(a, b), lambda a, b: a * b, one, other)
    check(rng, lambda f, a, b: f.div(a, b), lambda a, b: a / b, one, other, positive=True)


def test_shapes_that_cannot_be_broadcast_are_refused() -> None:
    f = Functions.on(CPU)
    with pytest.raises(TesseraError, match=r"mul: shapes or dtypes do not fit: .*\(2, 3\).*\(2,\)"):
        f.mul(f.variable(np.ones((2, 3), np.float32)), f.variable(np.ones(2, np.float32)))


def test_columns(rng: np.random.Generator) -> None:
    check(rng, lambda f, x: f.columns(x, 2, 5), lambda x: x[:, 2:5], (3, 7))
    check(rng, lambda f, a, b: f.join_columns(a, b), lambda a, b: np.hstack([a, b]), (3, 4), (3, 1))

    def added(x: Array, part: Array) -> Array:
        return x + 0.5 * np.pad(part, ((0, 0), (2, 3)))

    check(rng, lambda f, x, part: f.add_columns(x, part, 2, 0.5), added, (3, 7), (3, 2))


@pytest.mark.parametrize("shape", [(1, 3), (5, 8), (17, 65)])
def test_norms(shape: tuple[int, int], rng: np.random.Generator) -> None:
    width = shape[1:]
    check(rng, lambda f, x, w: f.rmsnorm(x, w, 1e-3), lambda x, w: gradients.rmsnorm(x, w, 1e-3), shape, width)
    check(
        rng,
        lambda f, x, w, b: f.layernorm(x, w, b, 1e-3),
        lambda x, w, b: gradients.layernorm(x, w, b, 1e-3),
        *(shape, width, width),
    )
    check(
        rng,
        lambda f, x, w: f.layernorm(x, w, None, 1e-3),
        lambda x, w: gradients.layernorm(x, w, np.zeros(1), 1e-3),
        shape,
        width,
    )


@pytest.mark.parametrize("shape", [(1, 2), (5, 6), (9, 38)])
def test_activations(shape: tuple[int, int], rng: np.random.Generator) -> None:
    half = shape[1] // 2
    check(rng, lambda f, x: f.silu(x), gradients.silu, shape)
    check(rng, lambda f, x: f.silu_mul(x), lambda x: gradients.silu(x[:, :half]) * x[:, half:], shape)
    for tanh in (True, False):
        check(rng, lambda f, x, t=tanh: f.gelu(x, tanh=t), lambda x, t=tanh: gradients.gelu(x, t), shape)
        check(
            rng,
            lambda f, x, t=tanh: f.gelu_mul(x, tanh=t),
            lambda x, t=tanh: gradients.gelu(x[:, :half], t) * x[:, half:],
            shape,
        )


@pytest.mark.parametrize("shape", [(1, 1), (4, 9), (3, 130)])
def test_softmax(shape: tuple[int, int], rng: np.random.Generator) -> None:
    check(rng, lambda f, x: f.softmax(x), gradients.softmax, shape)
    check(rng, lambda f, x: f.softmax(x, log=True), lambda x: np.log(gradients.softmax(x)), shape)


def test_embedding_sums_rows_of_one_id(rng: np.random.Generator) -> None:
    ids = np.array([3, 0, 3, 3, 6, 0, -5, 7], np.int32)  # the last two name no row

    def rows(table: Array) -> Array:
        return np.where(((ids >= 0) & (ids < 7))[:, None], table[ids.clip(0, 6)], 0)

    check(rng, lambda f, table: f.embedding(from_numpy(ids, CPU), table), rows, (7, 5))


@pytest.mark.parametrize(("head_dim", "rotary", "rotated"), [(4, 4, 3), (6, 2, 2), (8, 6, 1)])
def test_rope(head_dim: int, rotary: int, rotated: int, rng: np.random.Generator) -> None:
    cos_sin = rng.normal(size=(9, rotary)).astype(np.float32)  # scaled cosines and sines too: the map is linear
    positions = np.array([0, 5, 1, 8, 2], np.int32)
    check(
        rng,
        lambda f, x: f.rope(
            x, from_numpy(cos_sin, CPU), from_numpy(positions, CPU), head_dim=head_dim, num_rotated=rotated
        ),
        lambda x: gradients.rope(x, cos_sin, positions, head_dim, rotated),
        (5, 3 * head_dim),
    )


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "window"),
    [
        ((1,), 1, 1, 2, None),
        ((5, 1, 9), 4, 2, 6, None),
        ((7, 12), 3, 1, 5, 4),
        ((300,), 2, 1, 4, None),  # several tiles and blocks
        ((290, 3), 2, 2, 3, 150),
        ((11,), 2, 2, 4, 1),
    ],
)
def test_attention(
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    rng: np.random.Generator,
) -> None:
    packed = PackedSequences.of_lengths(lengths, CPU)
    check(
        rng,
        lambda f, qkv: f.packed_attention(
            qkv, packed, num_heads=heads, num_kv_heads=kv_heads, scale=0.7, sliding_window=window
        ),
        lambda qkv: gradients.attention(qkv, lengths, heads, kv_heads, 0.7, window),
        (sum(lengths), (heads + 2 * kv_heads) * head_dim),
    )


def test_packed_sequences_do_not_see_one_another(rng: np.random.Generator) -> None:
    """The result and the gradient of one are, bit for bit, what they are alone."""
    qkv = rng.normal(size=(300, 16)).astype(np.float32)
    upper = rng.normal(size=(300, 8)).astype(np.float32)
    f = Functions.on(CPU)

    def run(rows: slice, lengths: tuple[int, ...]) -> tuple[Array, Array]:
        x = f.variable(qkv[rows])
        out = f.packed_attention(x, PackedSequences.of_lengths(lengths, CPU), num_heads=2, num_kv_heads=1, scale=0.5)
        f.backward(out, from_numpy(upper[rows], CPU))
        assert x.gradient is not None
        return out.value.numpy(), x.gradient.numpy()

    together = run(slice(0, 300), (10, 170, 120))
    alone = run(slice(10, 180), (170,))
    for whole, part in zip(together, alone, strict=True):
        np.testing.assert_array_equal(whole[10:180], part)


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 2), (5, 11), (9, 301)])
def test_cross_entropy(tokens: int, vocab: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.engine.ops.training.cpu.loss.CHUNK_ELEMENTS", 1)  # so that there are several chunks
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    factors = rng.uniform(0.1, 1, tokens).astype(np.float32)
    if tokens > 3:
        targets[1], factors[2] = -100, 0
    check(
        rng,
        lambda f, x, w: f.linear_cross_entropy(
            x, w, from_numpy(targets, CPU), from_numpy(factors, CPU), multiplier=0.5
        ),
        lambda x, w: gradients.cross_entropy(x, w, targets, factors, 0.5),
        *((tokens, 6), (vocab, 6)),
    )


def test_cross_entropy_of_large_logits_is_finite() -> None:
    f = Functions.on(CPU)
    x, weight = f.variable(np.full((1, 1), 1e4, np.float32)), f.variable(np.array([[1.0], [-1.0]], np.float32))
    targets, factors = from_numpy(np.array([1], np.int32), CPU), from_numpy(np.ones(1, np.float32), CPU)
    loss = f.linear_cross_entropy(x, weight, targets, factors)
    assert loss.value.numpy()[0] == 2e4
    f.backward(loss)
    assert x.gradient is not None
    assert x.gradient.numpy()[0, 0] == 2


def test_a_cross_entropy_within_a_function_has_the_gradients_that_the_function_gives_it(
    rng: np.random.Generator,
) -> None:
    """They are computed with the loss, before it is known what is made of it."""
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((7, 6), (11, 6))]
    targets = from_numpy(rng.integers(0, 11, 7).astype(np.int32), CPU)
    factors = from_numpy(rng.uniform(0.1, 1, 7).astype(np.float32), CPU)

    def gradients_of(*scales: float) -> list[Any]:
        f = Functions.on(CPU)
        x, weight = map(f.variable, arrays)
        f.linear_cross_entropy(x, weight, targets, factors)
        assert x.gradient is weight.gradient is None, "no backward has run"
        for scale in scales:
            loss = f.linear_cross_entropy(x, weight, targets, factors)
            f.backward(loss if scale == 1 else f.scale(loss, scale))
        assert x.gradient is not None
        assert weight.gradient is not None
        return [x.gradient.numpy(), weight.gradient.numpy()]

    for scales in ((3.0,), (1.0, 1.0), (1.0, -0.5), (-0.5, 1.0)):
        for found, once in zip(gradients_of(*scales), gradients_of(1.0), strict=True):
            np.testing.assert_allclose(found, sum(scales) * once, rtol=1e-5, atol=1e-7)


def test_16_bit_values_have_float32_gradients(rng: np.random.Generator) -> None:
    x, weight = (rng.normal(size=shape).astype(bfloat16) for shape in ((40, 8), (6, 8)))
    _, (dx, dw) = value_and_gradients(lambda f, x, w: f.sum(f.matmul(x, w)), x, weight)
    assert dx.dtype == dw.dtype == np.float32
    np.testing.assert_allclose(dw, np.tile(x.astype(np.float32).sum(0), (6, 1)), rtol=1e-5, atol=1e-5)


# -- the tape ---------------------------------------------------------------------------------------


def test_gradients_accumulate_over_uses_and_backwards() -> None:
    f = Functions.on(CPU)
    x = f.variable(np.array([[2.0, 3.0]], np.float32))
    for _ in range(2):
        f.backward(f.sum(f.add(f.mul(x, x), x)))  # x^2 + x
    assert x.gradient is not None
    assert x.gradient.numpy().tolist() == [[10, 14]]


def test_a_shared_gradient_is_not_written_to() -> None:
    """The gradient of a sum is the same tensor for both terms; adding to one must not change the other."""
    f = Functions.on(CPU)
    a, b = f.variable(np.ones((1, 2), np.float32)), f.variable(np.ones((1, 2), np.float32))
    total = f.add(f.scale(a, 1.0), f.scale(b, 1.0))
    f.backward(f.sum(f.add(total, total)))
    assert a.gradient is not None
    assert b.gradient is not None
    assert a.gradient.numpy().tolist() == b.gradient.numpy().tolist() == [[2, 2]]


def test_no_grad_records_nothing() -> None:
    f = Functions.on(CPU)
    x = f.variable(np.ones((1, 2), np.float32))
    with f.no_grad():
        y = f.sum(x)
    assert not y.requires_grad
    with pytest.raises(TesseraError, match="computed without gradients"):
        f.backward(y)


def test_a_backward_runs_once_and_of_one_number() -> None:
    f = Functions.on(CPU)
    x = f.variable(np.ones((1, 2), np.float32))
    y = f.scale(x, 2.0)
    with pytest.raises(TesseraError, match="must be given: it is not a single number"):
        f.backward(y)
    with pytest.raises(TesseraError, match="does not fit"):
        f.backward(y, from_numpy(np.ones((2, 2), np.float32), CPU))
    f.backward(y, from_numpy(np.ones((1, 2), np.float32), CPU))
    with pytest.raises(TesseraError, match="has run already"):
        f.backward(y, from_numpy(np.ones((1, 2), np.float32), CPU))


def test_a_checkpoint_gives_the_same_bits_and_keeps_no_inner_values(rng: np.random.Generator) -> None:
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((6, 8), (16, 8), (8, 8), (8,))]

    def run(checkpointed: bool) -> tuple[list[Array], int]:
        f = Functions.on(CPU)
        x, up, down, norm = map(f.variable, arrays)

        def layer(x: Variable) -> Variable:
            return f.add(x, f.matmul(f.silu_mul(f.matmul(f.rmsnorm(x, norm, 1e-6), up)), down))

        y = x
        for _ in range(2):
            y = f.checkpoint(layer, y) if checkpointed else layer(y)
        kept = len(f._nodes)
        f.backward(f.sum(y))
        return [variable.gradient.numpy() for variable in (x, up, down, norm) if variable.gradient is not None], kept

    plain, checkpointed = run(False), run(True)
    assert (plain[1], checkpointed[1]) == (10, 2)
    for one, other in zip(plain[0], checkpointed[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_errors_name_the_tensors() -> None:
    f = Functions.on(CPU)
    x = f.variable(np.ones((2, 6), np.float32))
    with pytest.raises(TesseraError, match=r"packed_attention of 4 heads: .*\(2, 6\)"):
        f.packed_attention(x, PackedSequences.of_lengths([2], CPU), num_heads=2, num_kv_heads=1, scale=1.0)
    with pytest.raises(TesseraError, match="packed sequences: "):
        f.packed_attention(x, PackedSequences.of_lengths([3], CPU), num_heads=1, num_kv_heads=1, scale=1.0)
    with pytest.raises(TesseraError, match="at least one token"):
        PackedSequences.of_lengths([2, 0], CPU)
    with pytest.raises(TesseraError, match="columns: "):
        f.columns(x, 4, 7)
    with pytest.raises(TesseraError, match="int64 has no gradient"):
        value_and_gradients(lambda f, x: f.sum(x), np.ones(3, np.int64))
    with pytest.raises(TesseraError, match="must return a single number"):
        value_and_gradients(lambda f, x: f.scale(x, 1.0), np.ones((2, 2), np.float32))
