"""A decoder's forward in float64 NumPy, written from the meaning of its specifications, and random weights for them.

Shares no code with the project's forward. Rotary embeddings are of the default kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.rope import RopeConfig
from tessera.engine.models.specs import AttentionSpec, HalfNorms, MLPSpec, NormSpec
from tessera.engine.models.weights.build import MatrixField, NormField, VectorField, WeightSource, build_weights
from tessera.engine.models.weights.weights import AttentionWeights, HalfNormWeights, MLPWeights, NormWeights, Weights
from tessera.engine.tensor import CPU, Tensor, from_numpy
from tests.support.references import reference

Array = np.ndarray[Any, Any]


class RandomSource(WeightSource):
    """Dense float32 weights large enough for logits far from uniform."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def _normal(self, *shape: int, std: float, mean: float = 0.0) -> Array:
        return (self._random.standard_normal(shape) * std + mean).astype(np.float32)

    def settle(self) -> None:
        pass

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        std = 0.7 if field.name == "embedding" else 1.2 * field.columns**-0.5
        bias = from_numpy(self._normal(field.rows, std=0.3), CPU) if field.bias else None
        return LinearWeight.of(from_numpy(self._normal(field.rows, field.columns, std=std), CPU), bias)

    def vector(self, field: VectorField, layer: int | None) -> Tensor:
        return from_numpy(self._normal(field.size, std=0.3), CPU)

    def norm(self, field: NormField, layer: int | None) -> NormWeights:
        bias = from_numpy(self._normal(field.size, std=0.3), CPU) if field.bias else None
        return NormWeights(from_numpy(self._normal(field.size, std=0.25, mean=1.0), CPU), bias)


def random_weights(config: ModelConfig, seed: int) -> Weights:
    return build_weights(config, RandomSource(seed))


def numbers(weight: LinearWeight) -> Array:
    """What a weight stands for, [N, K] float64."""
    parts = [
        part.format.dequantize({name: tensor.numpy() for name, tensor in part.tensors.items()}, slice(None))
        for part in weight.parts
    ]
    return np.concatenate(parts).astype(np.float64)


def product(x: Array, weight: LinearWeight) -> Array:
    return reference.matmul(x, numbers(weight), None if weight.bias is None else weight.bias.numpy())


def logits(config: ModelConfig, weights: Weights, token_ids: list[int]) -> Array:
    """[T, V] float64"""
    stream = numbers(weights.embedding)[token_ids] * config.embedding_multiplier
    if weights.position_embedding is not None:
        stream = stream + numbers(weights.position_embedding)[: len(token_ids)]
    for spec, layer in zip(config.layers, weights.layers, strict=True):
        halves: list[tuple[HalfNorms, HalfNormWeights, Callable[[Array], Array]]] = [
            (
                spec.attention.norms,
                layer.attention.norms,
                lambda x, s=spec.attention, w=layer.attention: attention(config, s, w, x),  # type: ignore[misc]
            ),
            (spec.mlp.norms, layer.mlp.norms, lambda x, s=spec.mlp, w=layer.mlp: mlp(s, w, x)),  # type: ignore[misc]
        ]
        entering = stream
        for norms, held, half in halves:
            x = entering if spec.parallel else stream
            if spec.parallel and norms.before is None:
                norms_of, held_of = halves[0][:2]
                x = norm(norms_of.before, held_of.before, x)
            x = half(norm(norms.before, held.before, x))
            stream = stream + spec.residual_multiplier * norm(norms.after, held.after, x)
            stream = norm(norms.of_sum, held.of_sum, stream)
    assert weights.lm_head is not None
    found = product(norm(config.final_norm, weights.final_norm, stream), weights.lm_head) * config.logits_multiplier
    cap = config.logits_soft_cap
    return found if cap is None else cap * np.tanh(found / cap)


def norm(spec: NormSpec | None, weights: NormWeights | None, x: Array) -> Array:
    if spec is None:
        return x
    assert weights is not None
    if spec.kind == "rmsnorm":
        return reference.rmsnorm(x, weights.weight.numpy(), spec.eps)
    return reference.layernorm(
        x, weights.weight.numpy(), None if weights.bias is None else weights.bias.numpy(), spec.eps
    )


def mlp(spec: MLPSpec, weights: MLPWeights, x: Array) -> Array:
    up = product(x, weights.up)
    functions: dict[str, Callable[[Array], Array]] = {
        "silu_mul": reference.silu_mul,
        "gelu_tanh_mul": lambda y: reference.gated_gelu(y, True),
        "gelu_erf_mul": lambda y: reference.gated_gelu(y, False),
        "gelu_tanh": lambda y: reference.gelu(y, True),
        "gelu_erf": lambda y: reference.gelu(y, False),
        "relu": lambda y: np.maximum(y, 0),
        "relu2": lambda y: np.maximum(y, 0) ** 2,
    }
    return product(functions[spec.activation](up), weights.down)


def attention(config: ModelConfig, spec: AttentionSpec, weights: AttentionWeights, x: Array) -> Array:
    length = len(x)
    qkv = product(x, weights.qkv).reshape(length, -1, spec.head_dim).swapaxes(0, 1)
    q, k, v = np.split(qkv, [spec.num_heads, spec.num_heads + spec.num_kv_heads])
    if spec.qk_norm_form == "rotated_head" and spec.rope is not None:
        q, k = rotate(q, config.ropes[spec.rope]), rotate(k, config.ropes[spec.rope])
    if spec.qk_norm is not None:
        assert weights.q_norm is not None
        assert weights.k_norm is not None
        q = head_norm(spec, spec.qk_norm, weights.q_norm.numpy(), q)
        k = head_norm(spec, spec.qk_norm, weights.k_norm.numpy(), k)
    if spec.qk_norm_form != "rotated_head" and spec.rope is not None:
        q, k = rotate(q, config.ropes[spec.rope]), rotate(k, config.ropes[spec.rope])
    group = spec.num_heads // spec.num_kv_heads
    distance = np.arange(length)[:, None] - np.arange(length)
    visible = (distance >= 0) & (distance < (spec.sliding_window or math.inf))
    scores = q @ k.repeat(group, axis=0).swapaxes(1, 2) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
    scores = np.where(visible, scores, -np.inf)
    mixed = reference.softmax(scores) @ v.repeat(group, axis=0)
    return product(mixed.swapaxes(0, 1).reshape(length, -1), weights.out)


def head_norm(spec: AttentionSpec, norm: NormSpec, weight: Array, heads: Array) -> Array:
    """heads [n, T, D]"""
    if spec.qk_norm_form == "width":
        whole = heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
        return reference.rmsnorm(whole, weight, norm.eps).reshape(-1, *heads.shape[::2]).swapaxes(0, 1)
    if spec.qk_norm_form == "each_head":
        weights = weight.reshape(heads.shape[0], 1, heads.shape[2]).astype(np.float64)
        plain = reference.layernorm(heads, np.ones(heads.shape[2], np.float32), None, norm.eps)
        return plain * weights
    return reference.rmsnorm(heads, weight, norm.eps)


def rotate(heads: Array, rope: RopeConfig) -> Array:
    """heads [n, T, D]: pair (i, i + half) of the first rotary_dim elements is one complex number."""
    half = rope.rotary_dim // 2
    angles = np.outer(np.arange(heads.shape[1]), rope.theta ** (-np.arange(half) / half))
    turned = (heads[..., :half] + 1j * heads[..., half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, heads[..., 2 * half :]], axis=-1)
