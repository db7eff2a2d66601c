"""Mixtures of experts on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cpu.linear import multiply_rows
from tessera.engine.ops.cpu.precision import Float32Array, store, widen
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import Tensor, float32

IntArray = np.ndarray[Any, np.dtype[Any]]


class MoEOps(Ops):
    @np.errstate(all="ignore")
    def _route(
        self, logits: Tensor, routing: Routing, out: Routed, bias: Tensor | None, correction: Tensor | None
    ) -> None:
        scores = logits.numpy()
        if bias is not None:
            scores = scores + widen(bias)
        scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
        experts, weights = _choose(scores, routing, None if correction is None else correction.numpy())
        if routing.normalised:
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
        out.experts.numpy()[...] = experts
        out.weights.numpy()[...] = weights * np.float32(routing.scale)
        num_experts = scores.shape[1]
        flat = experts.ravel()
        pairs = np.argsort(flat, kind="stable")
        out.pairs.numpy()[...] = pairs
        out.places.numpy()[pairs] = np.arange(pairs.size)
        out.offsets.numpy()[...] = np.searchsorted(np.sort(flat), np.arange(num_experts + 1))

    def _expert_up(
        self,
        x: Tensor,
        weight: LinearWeight,
        routed: Routed,
        activation: Activation,
        product: Tensor,
        gathered: Tensor,
        out: Tensor,
    ) -> None:
        tokens = routed.pairs.numpy() // routed.experts.shape[1]
        rows, result = widen(x), np.empty(product.shape, float32)
        for expert, place in _used(routed):
            result[place] = _times_expert(rows[tokens[place]], weight, expert, product.shape[1])
        store(product, result)
        self._activate(activation, product, out)

    def _expert_down(self, x: Tensor, weight: LinearWeight, routed: Routed, out: Tensor) -> None:
        rows, result = widen(x), np.empty(out.shape, float32)
        for expert, place in _used(routed):
            result[place] = _times_expert(rows[place], weight, expert, out.shape[1])
        store(out, result)

    @np.errstate(all="ignore")
    def _combine_experts(
        self,
        x: Tensor,
        routed: Routed,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        accumulate: bool,
        out: Tensor,
    ) -> None:
        num_tokens, top_k = routed.weights.shape
        outputs = widen(x)[routed.places.numpy()].reshape(num_tokens, top_k, -1)
        scales = routed.weights.numpy()
        total = outputs[:, 0] * scales[:, 0, None]
        for i in range(1, top_k):
            total += outputs[:, i] * scales[:, i, None]
        if shared is not None:
            total += widen(shared) if shared_gate is None else widen(shared) / (1 + np.exp(-shared_gate.numpy()))
        if accumulate:
            total += widen(out)
        store(out, total)


def _choose(scores: Float32Array, routing: Routing, correction: Float32Array | None) -> tuple[IntArray, Float32Array]:
    """Experts [T, k] by logits [T, E], and their weights before `normalised` and `scale`."""
    if routing.kind == "sparsemixer":
        return _sparsemixer(scores, routing)
    if routing.kind == "sigmoid":
        sigmoid: Float32Array = np.reciprocal(1 + np.exp(-scores))
        chosen_by: Float32Array = sigmoid if correction is None else sigmoid + correction
        if routing.chosen_groups < routing.groups:
            chosen_by = _within_groups(chosen_by, routing)
        experts = _largest(chosen_by, routing.top_k)
        return experts, np.take_along_axis(sigmoid, experts, 1)
    if routing.kind == "softmax" and correction is not None:
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares: Float32Array = powers / powers.sum(axis=1, keepdims=True)
        experts = _largest(shares + correction, routing.top_k)
        return experts, np.take_along_axis(shares, experts, 1)
    experts = _largest(scores, routing.top_k)
    logits = np.take_along_axis(scores, experts, 1)
    largest = logits[:, :1]
    weights = np.exp(logits - largest)
    total = weights if routing.kind == "softmax_of_chosen" else np.exp(scores - largest)
    return experts, weights / total.sum(axis=1, keepdims=True)


def _largest(scores: Float32Array, count: int) -> IntArray:
    """The numbers of each row's largest scores, in descending order of these."""
    order: IntArray = np.argsort(-scores, axis=1, kind="stable")
    return order[:, :count]


def _within_groups(scores: Float32Array, routing: Routing) -> Float32Array:
    """-inf for the experts of groups that are not chosen."""
    grouped = scores.reshape(len(scores), routing.groups, -1)
    of_groups = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    chosen = np.zeros(of_groups.shape, bool)
    np.put_along_axis(chosen, _largest(of_groups, routing.chosen_groups), True, axis=1)
    return np.where(chosen[:, :, None], grouped, np.float32(-np.inf)).reshape(scores.shape)


def _sparsemixer(scores: Float32Array, routing: Routing) -> tuple[IntArray, Float32Array]:
    left = scores.copy()
    experts, weights = [], []
    for _ in range(routing.top_k):
        expert = left.argmax(axis=1)[:, None]
        largest = np.take_along_axis(left, expert, 1)
        below = (largest - scores) / np.maximum(np.abs(scores), largest)
        near = np.where(below > np.float32(2 * routing.jitter), np.float32(-np.inf), left)
        weights.append(1 / np.exp(near - largest).sum(axis=1, keepdims=True))
        experts.append(expert)
        np.put_along_axis(left, expert, np.float32(-np.inf), axis=1)
    return np.concatenate(experts, axis=1), np.concatenate(weights, axis=1)


def _used(routed: Routed) -> Iterator[tuple[int, slice]]:
    """The experts with pairs, and where theirs lie."""
    offsets = routed.offsets.numpy()
    for expert in np.flatnonzero(np.diff(offsets)).tolist():
        yield expert, slice(int(offsets[expert]), int(offsets[expert + 1]))


def _times_expert(rows: Float32Array, weight: LinearWeight, expert: int, size: int) -> Float32Array:
    """rows [n, K] times that expert's `size` rows of the weight, plus its bias -> [n, size]."""
    place = slice(expert * size, (expert + 1) * size)
    (part,) = weight.parts
    values = part.format.dequantize({name: tensor.numpy() for name, tensor in part.tensors.items()}, place)
    product = np.empty((len(rows), size), float32)
    multiply_rows(part.format.input_of(rows), values, product)
    if weight.bias is not None:
        product += widen(weight.bias[place])
    return product
