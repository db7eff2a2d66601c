"""Mixtures of experts in float64, one token at a time, and inputs for the tests of their operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import Device, empty, float32, int32

Array = np.ndarray[Any, Any]

ROUTINGS = {
    "softmax": Routing("softmax", 4),
    "softmax-normalised": Routing("softmax", 8, normalised=True),
    "softmax-of-chosen": Routing("softmax_of_chosen", 4, scale=1.5),
    "sigmoid": Routing("sigmoid", 8, normalised=True, scale=2.5),
    "sigmoid-groups": Routing("sigmoid", 6, groups=4, chosen_groups=2),
    "sparsemixer": Routing("sparsemixer", 2, jitter=0.1),
    "one": Routing("softmax", 1, normalised=True),
}


def routed_of(num_tokens: int, top_k: int, num_experts: int, device: Device) -> Routed:
    """Memory for a routing."""
    return Routed(
        empty((num_tokens, top_k), int32, device),
        empty((num_tokens, top_k), float32, device),
        empty((num_experts + 1,), int32, device),
        empty((num_tokens * top_k,), int32, device),
        empty((num_tokens * top_k,), int32, device),
    )


def route(logits: Array, routing: Routing, bias: Array | None, correction: Array | None) -> tuple[Array, Array]:
    """Experts and weights [T, k], float64."""
    chosen, weights = [], []
    for row in logits.astype(np.float64) + (0 if bias is None else bias.astype(np.float64)):
        if routing.kind == "sparsemixer":
            experts, scores = _sparsemixer(row, routing)
        elif routing.kind == "sigmoid":
            sigmoid = 1 / (1 + np.exp(-row))
            by = sigmoid + (0 if correction is None else correction)
            groups = by.reshape(routing.groups, -1)
            best = sorted(range(routing.groups), key=lambda g: -np.sort(groups[g])[-2:].sum())
            allowed = set(best[: routing.chosen_groups]) if routing.groups > 1 else {0}
            size = groups.shape[1]
            order = sorted((e for e in range(len(row)) if e // size in allowed), key=lambda e: -by[e])
            experts = order[: routing.top_k]
            scores = [sigmoid[e] for e in experts]
        else:
            shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            by = row if correction is None else shares + correction
            experts = sorted(range(len(row)), key=lambda e: -by[e])[: routing.top_k]
            among = experts if routing.kind == "softmax_of_chosen" else range(len(row))
            total = sum(np.exp(row[e] - row.max()) for e in among)
            scores = [np.exp(row[e] - row.max()) / total for e in experts]
        total = sum(scores) if routing.normalised else 1.0
        chosen.append(experts)
        weights.append([score / total * routing.scale for score in scores])
    return np.array(chosen), np.array(weights)


def _sparsemixer(row: Array, routing: Routing) -> tuple[list[int], list[float]]:
    experts: list[int] = []
    weights: list[float] = []
    for _ in range(routing.top_k):
        left = [e for e in range(len(row)) if e not in experts]
        best = max(left, key=lambda e: row[e])
        near = [e for e in left if (row[best] - row[e]) / max(abs(row[e]), row[best]) <= 2 * routing.jitter]
        weights.append(1 / sum(np.exp(row[e] - row[best]) for e in near))
        experts.append(best)
    return experts, weights


def grouped(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """Offsets [E + 1] and pairs [P]."""
    flat = experts.ravel()
    pairs = [pair for expert in range(num_experts) for pair in range(flat.size) if flat[pair] == expert]
    return np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=num_experts))]), np.array(pairs)


def activate(name: str, x: Array) -> Array:
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    if name == "clamped_swiglu_mul":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
        return up * gate / (1 + np.exp(-1.702 * gate))
    assert name == "silu_mul"
    return gate / (1 + np.exp(-gate)) * up


def uneven_experts(seed: int, num_tokens: int, top_k: int, num_experts: int) -> Array:
    """Experts [T, k] int32 of which some have many tokens and some none."""
    random = np.random.default_rng(seed)
    odds = random.random(num_experts) ** 3
    odds[num_experts // 2] = 0
    found = [random.choice(num_experts, top_k, replace=False, p=odds / odds.sum()) for _ in range(num_tokens)]
    return np.array(found, np.int32).reshape(num_tokens, top_k)
