"""Gradients by central differences in float64, and references of operations to take them of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Reference = Callable[..., Array]

STEP = 1e-5
MOST_ELEMENTS = 40  # of each input that are moved


def central_differences(
    reference: Reference, inputs: Sequence[Array], upper: Array, rng: np.random.Generator
) -> list[tuple[Array, Array]]:
    """Of sum(reference(*inputs) * upper): for each input some flat places, and the derivatives there."""
    doubles = [np.asarray(array, np.float64) for array in inputs]
    found = []
    for moved in doubles:
        flat = moved.reshape(-1)
        places = rng.permutation(flat.size)[:MOST_ELEMENTS]
        slopes = []
        for place in places:
            before = flat[place]
            sums = []
            for value in (before + STEP, before - STEP):
                flat[place] = value
                sums.append(float((reference(*doubles) * upper).sum()))
            flat[place] = before
            slopes.append((sums[0] - sums[1]) / (2 * STEP))
        found.append((places, np.array(slopes)))
    return found


def rope(x: Array, cos_sin: Array, positions: Array, head_dim: int, num_rotated: int) -> Array:
    heads = x.reshape(len(x), -1, head_dim).copy()
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions][:, None, :half], cos_sin[positions][:, None, half:]
    a, b = heads[:, :num_rotated, :half].copy(), heads[:, :num_rotated, half : 2 * half].copy()
    heads[:, :num_rotated, :half] = a * cos - b * sin
    heads[:, :num_rotated, half : 2 * half] = b * cos + a * sin
    return heads.reshape(x.shape)


def attention(
    qkv: Array, lengths: Sequence[int], num_heads: int, num_kv_heads: int, scale: float, window: int | None
) -> Array:
    """With the whole matrix of scores."""
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, -1)
    out = np.zeros((len(qkv), num_heads, heads.shape[2]), qkv.dtype)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        distance = np.arange(length)[:, None] - np.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        for head in range(num_heads):
            group = num_heads + head // (num_heads // num_kv_heads)
            scores = heads[rows, head] @ heads[rows, group].T * scale
            out[rows, head] = softmax(np.where(hidden, -np.inf, scores)) @ heads[rows, group + num_kv_heads]
    return out.reshape(len(qkv), -1)


def softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def layernorm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps) * weight + bias


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array, tanh: bool) -> Array:
    if tanh:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def cross_entropy(x: Array, weight: Array, targets: Array, factors: Array, multiplier: float) -> Array:
    """The sum over tokens, [1]."""
    logits = multiplier * x @ weight.T
    logits -= logits.max(axis=-1, keepdims=True)
    logs = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(x)), np.maximum(targets, 0)]
    return np.array([(np.where(targets >= 0, logs, 0) * factors).sum()])
