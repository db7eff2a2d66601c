"""Rotary embedding, cache and paged attention in NumPy against float64 formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.interface import HeadTransform
from tessera.engine.tensor import CPU, Tensor, bfloat16, float16, float32, from_numpy
from tests.support.cases.op_cases import (
    ATTENTION_CASES,
    DTYPES,
    AttentionCase,
    AttentionInputs,
    ElsewhereDevice,
    poisoned,
    random_angles,
    random_array,
)
from tests.support.references import reference
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

ops = CpuOps()
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensor(array: Array) -> Tensor:
    return from_numpy(np.ascontiguousarray(array), CPU)


# -- rope and cache -------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("rotary_dim", [None, 6, 16])
@pytest.mark.parametrize("norms", ["", "q", "k", "qk"])
def test_rope_and_store(norms: str, rotary_dim: int | None, dtype: np.dtype[Any]) -> None:
    num_heads, num_kv_heads, head_dim, block_size, tokens = 4, 2, 16, 8, 11
    qkv = random_array(15, (tokens, (num_heads + 2 * num_kv_heads) * head_dim), dtype)
    angles = np.random.default_rng(16).uniform(-3, 3, (60, (rotary_dim or 0) // 2))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    q_norm, k_norm = random_array(17, (head_dim,), dtype), random_array(18, (head_dim,), dtype)
    inputs = AttentionInputs(AttentionCase("", ((4, 37), (7, 7)), block_size=block_size))
    inputs.slot_mapping[[2, 9]] = -1
    key_cache = poisoned(inputs.key_cache.shape, dtype, CPU)
    value_cache = poisoned(inputs.key_cache.shape, dtype, CPU)
    out = poisoned((tokens, num_heads * head_dim), dtype, CPU)
    ops.rope_and_store(
        tensor(qkv),
        key_cache,
        value_cache,
        inputs.metadata(CPU),
        HeadTransform(
            None if rotary_dim is None else tensor(cos_sin),
            tensor(q_norm) if "q" in norms else None,
            tensor(k_norm) if "k" in norms else None,
        ),
        num_heads=num_heads,
        out=out,
    )

    heads = qkv.astype(np.float64).reshape(tokens, -1, head_dim)
    queries, keys, values = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    if "q" in norms:
        queries = reference.rmsnorm(queries, q_norm, 1e-6)
    if "k" in norms:
        keys = reference.rmsnorm(keys, k_norm, 1e-6)
    queries = reference.rotate(queries, cos_sin, inputs.positions)
    keys = reference.rotate(keys, cos_sin, inputs.positions)
    assert_close(out.numpy(), queries.reshape(tokens, -1), dtype)
    untouched = np.ones(key_cache.shape[0] * block_size, bool)
    for token, slot in enumerate(inputs.slot_mapping):
        if slot >= 0:
            untouched[slot] = False
            block, offset = divmod(int(slot), block_size)
            assert_close(key_cache.numpy()[block, :, offset], keys[token], dtype)
            np.testing.assert_array_equal(value_cache.numpy()[block, :, offset].astype(np.float64), values[token])
    assert untouched.sum() == untouched.size - 9
    for cache in (key_cache, value_cache):
        by_slot = cache.numpy().astype(np.float32).swapaxes(1, 2).reshape(untouched.size, -1)
        assert np.isnan(by_slot[untouched]).all()


@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotation_in_place(rotary_dim: int, dtype: np.dtype[Any]) -> None:
    """Of the first heads alone, as `rope_and_store` rotates."""
    x, cos_sin = random_array(2, (9, 5 * 16), dtype), random_angles(40, rotary_dim)
    positions = np.random.default_rng(3).integers(0, 40, 9).astype(np.int32)
    out = ops.rotate(tensor(x), tensor(cos_sin), tensor(positions), num_heads=3, head_dim=16).numpy()
    half = rotary_dim // 2
    heads = x.astype(np.float64).reshape(9, 5, 16)
    turned = (heads[..., :half] + 1j * heads[..., half:rotary_dim]) * (
        cos_sin[positions, None, :half] + 1j * cos_sin[positions, None, half:]
    )
    expected = heads.copy()
    expected[:, :3, :rotary_dim] = np.concatenate([turned.real, turned.imag], axis=-1)[:, :3]
    assert_close(out, expected.reshape(x.shape), dtype)
    np.testing.assert_array_equal(out[:, 48:], x[:, 48:])


def test_rope_and_store_of_nothing() -> None:
    inputs = AttentionInputs(AttentionCase("", ((1, 1),)))
    key_cache, value_cache = inputs.caches(CPU)
    empty_metadata = AttentionInputs(AttentionCase("", ())).metadata(CPU)
    out = ops.rope_and_store(
        tensor(random_array(1, (0, 8 * 16))), key_cache, value_cache, empty_metadata, HeadTransform(), num_heads=4
    )
    assert out.shape == (0, 64)


# -- paged attention ------------------------------------------------------------------------------


def attend(inputs: AttentionInputs, out: Tensor | None = None) -> Array:
    case = inputs.case
    key_cache, value_cache = inputs.caches(CPU)
    return ops.paged_attention(
        tensor(inputs.q),
        key_cache,
        value_cache,
        inputs.metadata(CPU),
        scale=case.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        out=out,
    ).numpy()


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_paged_attention(case: AttentionCase) -> None:
    inputs = AttentionInputs(case)
    out = poisoned(inputs.q.shape, case.dtype, CPU)
    attend(inputs, out)
    expected = reference.paged_attention(
        inputs.q,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.cu_seqlens_q,
        inputs.context_lens,
        case.scale,
        case.sliding_window,
        case.soft_cap,
    )
    assert_close(out.numpy(), expected, case.dtype)


@pytest.mark.parametrize("cached", [float16, float32], ids=str)
@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
def test_a_cache_of_another_dtype(dtype: np.dtype[Any], cached: np.dtype[Any]) -> None:
    inputs = AttentionInputs(AttentionCase("", ((1, 40), (7, 33)), dtype=dtype))
    inputs.key_cache, inputs.value_cache = (each.astype(cached) for each in (inputs.key_cache, inputs.value_cache))
    expected = reference.paged_attention(
        inputs.q,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.cu_seqlens_q,
        inputs.context_lens,
        inputs.case.scale,
        None,
    )
    assert_close(attend(inputs), expected, dtype)


def test_paged_attention_of_nothing() -> None:
    assert attend(AttentionInputs(AttentionCase("", ()))).shape == (0, 64)


@pytest.mark.parametrize("sliding_window", [None, 9])
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunks_of_a_prefill_equal_the_whole(chunk: int, sliding_window: int | None) -> None:
    whole = AttentionInputs(AttentionCase("", ((90, 90),), sliding_window=sliding_window))
    expected = attend(whole)
    for start in range(0, 90, chunk):
        end = min(start + chunk, 90)
        part = AttentionInputs(AttentionCase("", ((end - start, end),), sliding_window=sliding_window))
        part.key_cache, part.value_cache = whole.key_cache, whole.value_cache
        part.block_tables, part.q = whole.block_tables, whole.q[start:end]
        assert_close(attend(part), expected[start:end], float32)


def test_a_decode_row_is_bit_for_bit_what_it_is_alone() -> None:
    lengths = np.random.default_rng(19).integers(1, 700, 40)
    together = AttentionInputs(AttentionCase("", tuple((1, int(length)) for length in lengths), head_dim=20))
    expected = attend(together)
    for row, length in enumerate(lengths):
        alone = AttentionInputs(AttentionCase("", ((1, int(length)),), head_dim=20))
        alone.key_cache, alone.value_cache = together.key_cache, together.value_cache
        alone.block_tables, alone.q = together.block_tables[row : row + 1], together.q[row : row + 1]
        np.testing.assert_array_equal(attend(alone)[0], expected[row])


def test_a_broken_row_stays_alone() -> None:
    inputs = AttentionInputs(AttentionCase("", ((1, 30), (4, 30), (1, 30))))
    expected = attend(inputs)
    inputs.key_cache[inputs.block_tables[0, 0]] = np.nan
    inputs.value_cache[inputs.block_tables[0, 0]] = np.inf
    result = attend(inputs)
    assert np.isnan(result[0]).all()
    np.testing.assert_array_equal(result[1:], expected[1:])


def test_attention_may_write_over_its_queries() -> None:
    inputs = AttentionInputs(next(case for case in ATTENTION_CASES if case.name == "long_prefill_window"))
    key_cache, value_cache = inputs.caches(CPU)
    place = tensor(inputs.q)
    ops.paged_attention(
        place, key_cache, value_cache, inputs.metadata(CPU), scale=inputs.case.scale, sliding_window=40, out=place
    )
    np.testing.assert_array_equal(place.numpy(), attend(inputs))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["heads", "caches", "dtype", "rotary", "norm", "slots"])
def test_wrong_attention_inputs_are_refused_before_work(wrong: str) -> None:
    inputs = AttentionInputs(AttentionCase("", ((2, 2),)))
    key_cache, value_cache = (poisoned(inputs.key_cache.shape, float32, CPU) for _ in range(2))
    qkv, metadata = tensor(random_array(1, (2, 8 * 16))), inputs.metadata(CPU)
    cos_sin, q_norm, num_heads = tensor(random_array(1, (9, 16))), tensor(random_array(2, (16,))), 4
    if wrong == "heads":
        num_heads = 3
    elif wrong == "caches":
        value_cache = value_cache[1:]
    elif wrong == "dtype":
        qkv = tensor(np.zeros((2, 8 * 16), np.int32))
    elif wrong == "rotary":
        cos_sin = tensor(random_array(1, (9, 18)))
    elif wrong == "norm":
        q_norm = tensor(random_array(2, (8,)))
    else:
        metadata = AttentionInputs(AttentionCase("", ((3, 3),))).metadata(CPU)
    transform = HeadTransform(cos_sin, q_norm)
    with pytest.raises(TesseraError, match="do not fit"):
        ops.rope_and_store(qkv, key_cache, value_cache, metadata, transform, num_heads=num_heads)
    assert np.isnan(key_cache.numpy()).all()


def test_attention_refuses_a_block_table_from_another_device() -> None:
    inputs = AttentionInputs(AttentionCase("", ((2, 2),)))
    key_cache, value_cache = inputs.caches(CPU)
    with pytest.raises(TesseraError, match=r"positions is on cuda:7, but .* on cpu"):
        ops.paged_attention(tensor(inputs.q), key_cache, value_cache, inputs.metadata(ElsewhereDevice()), scale=1)
