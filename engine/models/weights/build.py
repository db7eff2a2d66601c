"""The weights that a configuration calls for, and their assembly from where they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.formats import DenseFormat, LinearWeight
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.specs import HalfNorms, LayerSpec, NormSpec
from tessera.engine.models.weights.weights import (
    AttentionWeights,
    ClassifierWeights,
    HalfNormWeights,
    LayerWeights,
    MLPWeights,
    NormWeights,
    Weights,
)
from tessera.engine.tensor import Tensor


@dataclass(frozen=True)
class MatrixField:
    """A `LinearWeight` by its name in `Architecture.weights`; `part_rows` are those of the matrices fused in it."""

    name: str
    part_rows: tuple[int, ...]
    columns: int
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(self.part_rows)


@dataclass(frozen=True)
class NormField:
    """A `NormWeights` by its name in `Architecture.weights`."""

    name: str
    size: int
    bias: bool = False


Field: TypeAlias = MatrixField | NormField
Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in total


class WeightSource(ABC):
    """Makes weights one after the other; `layer` is None for those outside of layers."""

    @abstractmethod
    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight: ...

    @abstractmethod
    def norm(self, field: NormField, layer: int | None) -> NormWeights: ...

    def kv_scales(self, layer: int, num_kv_heads: int) -> Tensor | None:
        """[2, num_kv_heads] float32, of a layer's keys and values in a cache of e4m3; None: 1."""
        return None


def model_fields(config: ModelConfig) -> Iterator[Field]:
    """Outside of layers."""
    hidden, vocab = config.hidden_size, (config.vocab_size,)
    yield MatrixField("embedding", vocab, hidden)
    if config.learned_positions:
        yield MatrixField("position_embedding", (config.first_position + config.max_position_embeddings,), hidden)
    if config.num_token_types:
        yield MatrixField("token_type_embedding", (config.num_token_types,), hidden)
    yield from _norm("embedding_norm", config.embedding_norm, hidden)
    yield from _norm("final_norm", config.final_norm, hidden)
    if not config.is_encoder and not config.tie_word_embeddings:
        yield MatrixField("lm_head", vocab, hidden)
    head = config.classifier
    if head is not None:
        if head.activation is not None:
            yield MatrixField(head.dense, (hidden,), hidden, head.dense_bias)
        yield from _norm("classifier_norm", head.norm, hidden)
        yield MatrixField("classifier", (len(head.labels),), hidden, head.bias)


def layer_fields(spec: LayerSpec, hidden: int) -> Iterator[Field]:
    """Of one layer; `hidden` is the width of the residual stream."""
    attention, mlp = spec.attention, spec.mlp
    qkv_rows = (attention.q_size, attention.kv_size, attention.kv_size)
    up_rows = (mlp.inner_size,) * (mlp.up_size // mlp.inner_size)
    yield from _norms("attention", attention.norms, hidden)
    yield MatrixField("qkv", qkv_rows, hidden, attention.qkv_bias)
    yield MatrixField("out", (hidden,), attention.q_size, attention.out_bias)
    yield from _norms("mlp", mlp.norms, hidden)
    yield MatrixField("up", up_rows, hidden, mlp.up_bias)
    yield MatrixField("down", (hidden,), mlp.inner_size, mlp.down_bias)
    for name in ("q_norm", "k_norm"):
        yield from _norm(name, attention.qk_norm, attention.head_dim)


def _norms(half: str, norms: HalfNorms, size: int) -> Iterator[NormField]:
    for place in ("before", "after", "of_sum"):
        yield from _norm(f"{half}_norm_{place}", getattr(norms, place), size)


def _norm(name: str, spec: NormSpec | None, size: int) -> Iterator[NormField]:
    if spec is not None:
        yield NormField(name, size, spec.bias)


def num_weight_bytes(config: ModelConfig, dtype: np.dtype[Any]) -> int:
    """Bytes that dense weights take in `dtype`."""
    fields = [*model_fields(config)]
    for spec in config.layers:
        fields += layer_fields(spec, config.hidden_size)
    return sum(_field_bytes(field, dtype) for field in fields)


def _field_bytes(field: Field, dtype: np.dtype[Any]) -> int:
    if isinstance(field, NormField):
        return field.size * (1 + field.bias) * dtype.itemsize
    return DenseFormat(dtype).nbytes(field.rows, field.columns) + field.bias * field.rows * dtype.itemsize


def build_weights(config: ModelConfig, source: WeightSource) -> Weights:
    """Everything that `source` makes, in the order of the fields."""
    linears, norms = _make(model_fields(config), source, None)
    layers = tuple(
        _layer(
            *_make(layer_fields(spec, config.hidden_size), source, index),
            source.kv_scales(index, spec.attention.num_kv_heads),
        )
        for index, spec in enumerate(config.layers)
    )
    embedding = linears["embedding"]
    classifier = None
    if config.classifier is not None:
        dense = linears.get(config.classifier.dense)
        classifier = ClassifierWeights(linears["classifier"], dense, norms.get("classifier_norm"))
    return Weights(
        embedding=embedding,
        layers=layers,
        final_norm=norms.get("final_norm"),
        lm_head=None if config.is_encoder else linears.get("lm_head", embedding),
        position_embedding=linears.get("position_embedding"),
        token_type_embedding=linears.get("token_type_embedding"),
        embedding_norm=norms.get("embedding_norm"),
        classifier=classifier,
    )


def _make(
    fields: Iterator[Field], source: WeightSource, layer: int | None
) -> tuple[dict[str, LinearWeight], dict[str, NormWeights]]:
    linears: dict[str, LinearWeight] = {}
    norms: dict[str, NormWeights] = {}
    for field in fields:
        if isinstance(field, MatrixField):
            linears[field.name] = source.linear(field, layer)
        else:
            norms[field.name] = source.norm(field, layer)
    return linears, norms


def _layer(linears: dict[str, LinearWeight], norms: dict[str, NormWeights], kv_scales: Tensor | None) -> LayerWeights:
    def around(half: str) -> HalfNormWeights:
        places = ("before", "after", "of_sum")
        return HalfNormWeights(*(norms.get(f"{half}_norm_{place}") for place in places))

    q_norm, k_norm = (norms[name].weight if name in norms else None for name in ("q_norm", "k_norm"))
    return LayerWeights(
        AttentionWeights(linears["qkv"], linears["out"], around("attention"), q_norm, k_norm, kv_scales),
        MLPWeights(linears["up"], linears["down"], around("mlp")),
    )
