"""A model's weights on the device, fused as the forwards want them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tessera.engine.formats import LinearWeight
from tessera.engine.models.offload.layer_stream import LayerStream
from tessera.engine.tensor import Tensor


@dataclass(frozen=True)
class NormWeights:
    """Of one norm over H elements."""

    weight: Tensor  # [H]
    bias: Tensor | None = None  # [H]


@dataclass(frozen=True)
class HalfNormWeights:
    """Of the norms in a `HalfNorms`."""

    before: NormWeights | None = None
    after: NormWeights | None = None
    of_sum: NormWeights | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """The rows of `qkv` are queries, then keys, then values."""

    qkv: LinearWeight  # [(Hq + 2 Hkv) * D, H]
    out: LinearWeight  # [H, Hq * D]
    norms: HalfNormWeights
    q_norm: Tensor | None = None  # [D], or [Hq * D]
    k_norm: Tensor | None = None  # [D], or [Hkv * D]
    sinks: Tensor | None = None  # [Hq]
    kv_scales: Tensor | None = None  # [2, Hkv] float32, of keys and values in a cache of e4m3


@dataclass(frozen=True)
class MLPWeights:
    """I is the inner size; where the activation is gated, the gate's rows of `up` come first."""

    up: LinearWeight  # [2 I or I, H]
    down: LinearWeight  # [H, I]
    norms: HalfNormWeights


@dataclass(frozen=True)
class MoEWeights:
    """E experts of inner size I, one after the other; of an expert that is gated the gate's rows come first."""

    router: LinearWeight  # [E, H]
    up: LinearWeight  # [E * 2 I or E * I, H]
    down: LinearWeight  # [E * H, I]
    norms: HalfNormWeights
    router_bias: Tensor | None = None  # [E]
    correction: Tensor | None = None  # [E] float32
    shared: MLPWeights | None = None
    shared_gate: LinearWeight | None = None  # [1, H]


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    attention: AttentionWeights
    mlp: MLPWeights | MoEWeights


@dataclass(frozen=True)
class ClassifierWeights:
    """Of the head in a `ClassifierSpec` with L labels."""

    out: LinearWeight  # [L, H]
    dense: LinearWeight | None = None  # [H, H]
    norm: NormWeights | None = None


@dataclass(frozen=True)
class Weights:
    """All weights of a decoder or an encoder; with a tied head `lm_head` is `embedding`.

    So it is in a decoder without a head, which `has_head` says: its logits mean nothing. Layers that `stream` brings to
    the device share memory there, so that each is right only while it is computed.
    """

    embedding: LinearWeight  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights | None = None
    lm_head: LinearWeight | None = None  # [V, H]
    position_embedding: LinearWeight | None = None  # [P, H]
    token_type_embedding: LinearWeight | None = None  # [K, H]
    embedding_norm: NormWeights | None = None
    classifier: ClassifierWeights | None = None
    has_head: bool = True
    stream: LayerStream | None = None

    def linear_weights(self) -> Iterator[LinearWeight]:
        """Every weight of a product or a lookup once, but those of experts."""
        experts = {id(weight) for weight, _ in self.experts()}
        found = {id(leaf): leaf for leaf in _leaves(self) if isinstance(leaf, LinearWeight)}
        yield from (leaf for key, leaf in found.items() if key not in experts)

    def experts(self) -> Iterator[tuple[LinearWeight, int]]:
        """Every weight of experts, and how many experts it is of."""
        for layer in self.layers:
            if isinstance(layer.mlp, MoEWeights):
                num_experts = layer.mlp.router.shape[0]
                yield layer.mlp.up, num_experts
                yield layer.mlp.down, num_experts

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        for leaf in {id(leaf): leaf for leaf in _leaves(self)}.values():
            if isinstance(leaf, LinearWeight):
                yield from leaf.tensors()
            else:
                yield leaf

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Of matrices; most first."""
        counts: Counter[str] = Counter()
        for weight in self.linear_weights():
            for part in weight.parts:
                counts[part.format.label] += sum(tensor.nbytes for tensor in part.tensors.values())
        return dict(counts.most_common())

    @property
    def num_parameters(self) -> int:
        """Numbers that the weights stand for, however they are stored."""
        leaves = {id(leaf): leaf for leaf in _leaves(self)}.values()
        return sum(leaf.num_parameters if isinstance(leaf, LinearWeight) else leaf.size for leaf in leaves)


def _leaves(value: Any) -> Iterator[LinearWeight | Tensor]:
    if isinstance(value, LinearWeight | Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
