"""The activations of mixtures of experts that a step's buffers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.models.specs import LayerSpec, MLPSpec, MoESpec
from tessera.engine.tensor import float32, int32


class MixtureWidth(NamedTuple):
    """Elements of `dtype` that an intermediate has for each token."""

    width: int
    dtype: np.dtype[Any]


def dense_mlps(layers: Sequence[LayerSpec]) -> list[MLPSpec]:
    """Those that are layers' halves, and shared experts."""
    halves = [layer.mlp for layer in layers]
    shared = [half.shared for half in halves if isinstance(half, MoESpec) and half.shared is not None]
    return [half for half in halves if isinstance(half, MLPSpec)] + shared


def mixture_widths(layers: Sequence[LayerSpec], hidden: int, dtype: np.dtype[Any]) -> dict[str, MixtureWidth]:
    """Of what every token of a step has; nothing without mixtures. `hidden` is the width of the residual stream."""
    specs = {layer.mlp for layer in layers if isinstance(layer.mlp, MoESpec)}
    if not specs:
        return {}
    top_k = max(spec.routing.top_k for spec in specs)
    return {
        "router_logits": MixtureWidth(max(spec.num_experts for spec in specs), float32),
        "experts": MixtureWidth(top_k, int32),
        "expert_weights": MixtureWidth(top_k, float32),
        "expert_pairs": MixtureWidth(top_k, int32),
        "expert_places": MixtureWidth(top_k, int32),
        "expert_up": MixtureWidth(max(spec.routing.top_k * spec.up_size for spec in specs), dtype),
        "expert_activated": MixtureWidth(max(spec.routing.top_k * spec.inner_size for spec in specs), dtype),
        "expert_rows": MixtureWidth(top_k * hidden, dtype),
        "shared": MixtureWidth(hidden, dtype),
        "shared_gate": MixtureWidth(1, float32),
    }


def most_experts(layers: Sequence[LayerSpec]) -> int:
    """Of a layer; 0 without mixtures."""
    return max((layer.mlp.num_experts for layer in layers if isinstance(layer.mlp, MoESpec)), default=0)


def experts_per_chosen(layers: Sequence[LayerSpec]) -> float:
    """A layer's experts for each that a token passes, at most; 1 without mixtures."""
    mixtures = (layer.mlp for layer in layers if isinstance(layer.mlp, MoESpec))
    return max((mixture.num_experts / mixture.routing.top_k for mixture in mixtures), default=1.0)
