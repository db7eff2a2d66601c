"""The operations' formulas in float64 NumPy, written for clarity, and the measure of agreement.

Nothing here shares code with `engine/ops`: both follow the descriptions in `engine/ops/interface.py`.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

TOLERANCES = {
    np.dtype(np.float32): 1e-5,
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 1e-2,
}


def assert_close(
    actual: Array,
    expected: Array,
    dtype: np.dtype[Any],
    *,
    floor: float = 1.0,
    typical: float = 0.0,
    roundings: int = 1,
) -> None:
    """Every element within the dtype's relative tolerance of what is expected.

    The error of an element is relative to the largest of its own expected size, `floor` times the
    largest in its row (last axis; 1 for sums, where cancellation leaves errors of the terms' size, less
    for results of single elements) and `typical`, the size that results have in general. NaN never
    passes; infinities must agree. `roundings`: how often in a row the two may have rounded to `dtype`.
    """
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    if not actual.size:
        return
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    assert np.isfinite(actual[finite]).all(), f"{(~np.isfinite(actual[finite])).sum()} elements are not finite"
    size = np.where(finite, np.abs(expected), 0)
    scale = np.maximum(np.maximum(size, floor * size.max(axis=-1, keepdims=True)), typical)
    error = np.where(finite, np.abs(actual - np.where(finite, expected, 0)), 0)
    excess = error - roundings * TOLERANCES[np.dtype(dtype)] * scale
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    assert excess[worst] <= 0, (
        f"{(excess > 0).sum()} of {excess.size} elements differ; worst at {tuple(map(int, worst))}: "
        f"{actual[worst]!r} instead of {expected[worst]!r}"
    )


def bits(array: Array) -> Array:
    """For comparisons in which -0 is not 0 and one NaN may equal another."""
    return array.view(np.uint8)


def assert_same_cache(actual: Array, expected: Array, dtype: np.dtype[Any]) -> None:
    """The NaN of slots without a token are still there."""
    actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    empty_slots = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), empty_slots)
    assert_close(np.where(empty_slots, 0, actual), np.where(empty_slots, 0, expected), dtype)


def matmul(x: Array, weight: Array, bias: Array | None = None) -> Array:
    product = x.astype(np.float64) @ weight.astype(np.float64).T
    return product if bias is None else product + bias.astype(np.float64)


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    x = x.astype(np.float64)
    return x * (np.mean(x**2, axis=-1, keepdims=True) + eps) ** -0.5 * weight.astype(np.float64)


def layernorm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    x = x.astype(np.float64)
    normalised = (x - x.mean(-1, keepdims=True)) * (x.var(-1, keepdims=True) + eps) ** -0.5
    return normalised * weight.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))


def softmax(x: Array) -> Array:
    e = np.exp(x.astype(np.float64) - x.astype(np.float64).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu_mul(gate_up: Array) -> Array:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def gelu(x: Array, tanh: bool) -> Array:
    x = x.astype(np.float64)
    if tanh:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    phi = [0.5 * math.erfc(-value / math.sqrt(2)) for value in x.reshape(-1)]
    return x * np.array(phi).reshape(x.shape)


def gated_gelu(gate_up: Array, tanh: bool) -> Array:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return gelu(gate, tanh) * up


def rotate(heads: Array, cos_sin: Array, positions: Array) -> Array:
    """heads [T, H, D]: pair (i, i + half) turned by the angle of cos_sin's row at the token's position."""
    heads, half = heads.astype(np.float64), cos_sin.shape[1] // 2
    turned = heads.copy()
    for token, position in enumerate(positions):
        for i in range(half):
            cos, sin = float(cos_sin[position, i]), float(cos_sin[position, half + i])
            a, b = heads[token, :, i], heads[token, :, half + i]
            turned[token, :, i] = a * cos - b * sin
            turned[token, :, half + i] = a * sin + b * cos
    return turned


def paged_attention(
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    cu_seqlens_q: Array,
    context_lens: Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """One query at a time over exactly the keys it sees; q [T, Hq * D], sinks [Hq]."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    heads = q.astype(np.float64).reshape(len(q), -1, head_dim)
    group = heads.shape[1] // num_kv_heads
    out = np.zeros_like(heads)
    for row, context_len in enumerate(context_lens):
        first, last = cu_seqlens_q[row], cu_seqlens_q[row + 1]
        for token in range(first, last if context_len else first):
            position = context_len - (last - token)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = np.arange(oldest, position + 1)
            blocks, offsets = block_tables[row, seen // block_size], seen % block_size
            for head in range(heads.shape[1]):
                keys = key_cache[blocks, head // group, offsets].astype(np.float64)
                values = value_cache[blocks, head // group, offsets].astype(np.float64)
                scores = keys @ heads[token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if sinks is not None:
                    scores, values = np.append(scores, float(sinks[head])), np.vstack([values, np.zeros(head_dim)])
                out[token, head] = softmax(scores) @ values
    return out.reshape(q.shape)


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def normal(index: int, seed: int) -> float:
    """Element `index` of `fill_normal` with mean 0 and deviation 1 (Box and Muller 1958)."""
    block, lane = divmod(index, 4)
    words = philox4x32_10((block & 0xFFFFFFFF, block >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    first, second = words[lane // 2 * 2 : lane // 2 * 2 + 2]
    radius = math.sqrt(-2 * math.log(((first >> 8) + 1) / 2**24))
    angle = 2 * math.pi * (second >> 8) / 2**24
    return radius * (math.cos(angle) if lane % 2 == 0 else math.sin(angle))
