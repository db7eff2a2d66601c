"""The weights that a configuration calls for, and their assembly from where they come from."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np

from tessera.engine.formats import BLOCK_FORMATS, DenseFormat, LinearWeight, WeightFormat
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.mixture.stored import EXPERTS_DOWN, EXPERTS_UP
from tessera.engine.models.offload.host_layers import HostLayers
from tessera.engine.models.partition import Share
from tessera.engine.models.specs import HalfNorms, LayerSpec, MLPSpec, MoESpec, NormSpec
from tessera.engine.models.weights.weights import (
    AttentionWeights,
    ClassifierWeights,
    HalfNormWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
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

    def shared(self, share: Share) -> Self:
        """A rank's part of it."""
        counts, columns = self.part_rows, self.columns
        if share.rows is not None:
            bounds = np.cumsum((0, *counts))
            counts = tuple(
                int(((share.rows >= first) & (share.rows < last)).sum()) for first, last in itertools.pairwise(bounds)
            )
        if share.columns is not None:
            columns = share.columns.stop - share.columns.start
        return replace(self, part_rows=counts, columns=columns, bias=self.bias and share.has_bias)


@dataclass(frozen=True)
class NormField:
    """A `NormWeights` by its name in `Architecture.weights`."""

    name: str
    size: int
    bias: bool = False


@dataclass(frozen=True)
class VectorField:
    """A vector by its name in `Architecture.weights`, which is the tensor's; in float32 or the weights' dtype."""

    name: str
    size: int
    float32: bool = False
    bias = False


@dataclass(frozen=True)
class ExpertsField(MatrixField):
    """The same matrix of every expert, one below the other; `part_rows` are those of one. Named by `ExpertForm`s."""

    num_experts: int = 1

    @property
    def rows(self) -> int:
        return self.num_experts * self.expert_rows

    @property
    def expert_rows(self) -> int:
        return sum(self.part_rows)


Field: TypeAlias = MatrixField | NormField | VectorField
Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in total


class WeightSource(ABC):
    """Makes weights one after the other; `layer` is None for those outside of layers."""

    @abstractmethod
    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight: ...

    @abstractmethod
    def norm(self, field: NormField, layer: int | None) -> NormWeights: ...

    @abstractmethod
    def vector(self, field: VectorField, layer: int | None) -> Tensor: ...

    def kv_scales(self, layer: int, num_kv_heads: int) -> Tensor | None:
        """[2, num_kv_heads] float32, of a layer's keys and values in a cache of e4m3; None: 1."""
        return None

    @abstractmethod
    def settle(self) -> None:
        """Return when all that was made is on the device."""


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
        yield MatrixField("lm_head", vocab, hidden, config.head_bias)
    head = config.classifier
    if head is not None:
        if head.activation is not None:
            yield MatrixField(head.dense, (hidden,), hidden, head.dense_bias)
        yield from _norm("classifier_norm", head.norm, hidden)
        yield MatrixField("classifier", (len(head.labels),), hidden, head.bias)


def predictor_fields(hidden: int) -> Iterator[NormField | MatrixField]:
    """Of a layer of multi-token prediction, beside those of its decoder layer; see `PredictorRule`."""
    yield NormField("token_norm", hidden)
    yield NormField("state_norm", hidden)
    yield MatrixField("join", (hidden,), 2 * hidden)


def layer_fields(spec: LayerSpec, hidden: int) -> Iterator[Field]:
    """Of one layer; `hidden` is the width of the residual stream."""
    attention, mlp = spec.attention, spec.mlp
    qkv_rows = (attention.q_size, attention.kv_size, attention.kv_size)
    yield from _norms("attention", attention.norms, hidden)
    yield MatrixField("qkv", qkv_rows, hidden, attention.qkv_bias)
    yield MatrixField("out", (hidden,), attention.q_size, attention.out_bias)
    if attention.sinks:
        yield VectorField("sinks", attention.num_heads)
    yield from _norms("mlp", mlp.norms, hidden)
    if isinstance(mlp, MoESpec):
        yield from _expert_fields(mlp, hidden)
    else:
        yield from _mlp_fields("", mlp, hidden)
    for name, size in (("q_norm", attention.q_size), ("k_norm", attention.kv_size)):
        over_head = attention.qk_norm_form in ("head", "rotated_head")
        yield from _norm(name, attention.qk_norm, attention.head_dim if over_head else size)


def _mlp_fields(prefix: str, mlp: MLPSpec, hidden: int) -> Iterator[Field]:
    yield MatrixField(prefix + "up", _up_rows(mlp), hidden, mlp.up_bias)
    yield MatrixField(prefix + "down", (hidden,), mlp.inner_size, mlp.down_bias)


def _expert_fields(spec: MoESpec, hidden: int) -> Iterator[Field]:
    count = spec.num_experts
    yield MatrixField("router", (count,), hidden, spec.router_bias)
    if spec.correction:
        yield VectorField("router_correction", count, float32=True)
    yield ExpertsField(EXPERTS_UP, _up_rows(spec), hidden, spec.up_bias, count)
    yield ExpertsField(EXPERTS_DOWN, (hidden,), spec.inner_size, spec.down_bias, count)
    if spec.shared is not None:
        yield from _mlp_fields("shared_", spec.shared, hidden)
        if spec.shared_gate:
            yield MatrixField("shared_gate", (1,), hidden)


def _up_rows(spec: MLPSpec | MoESpec) -> tuple[int, ...]:
    return (spec.inner_size,) * (spec.up_size // spec.inner_size)


def _norms(half: str, norms: HalfNorms, size: int) -> Iterator[NormField]:
    for place in ("before", "after", "of_sum"):
        yield from _norm(f"{half}_norm_{place}", getattr(norms, place), size)


def _norm(name: str, spec: NormSpec | None, size: int) -> Iterator[NormField]:
    if spec is not None:
        yield NormField(name, size, spec.bias)


def num_weight_bytes(config: ModelConfig, dtype: np.dtype[Any]) -> int:
    """Bytes that weights take in `dtype`, but experts in MXFP4."""
    outer = sum(_field_bytes(field, dtype, in_mxfp4=config.mxfp4_experts) for field in model_fields(config))
    return outer + sum(layer_bytes(config, dtype))


def layer_bytes(config: ModelConfig, dtype: np.dtype[Any]) -> list[int]:
    """Of `num_weight_bytes` those of each layer."""
    return [
        sum(
            _field_bytes(field, dtype, in_mxfp4=config.mxfp4_experts)
            for field in layer_fields(spec, config.hidden_size)
        )
        for spec in config.layers
    ]


def num_parameters(config: ModelConfig) -> int:
    """Numbers that the weights stand for."""
    fields = [*model_fields(config)]
    for spec in config.layers:
        fields += layer_fields(spec, config.hidden_size)
    return sum(
        field.rows * (field.columns + field.bias) if isinstance(field, MatrixField) else field.size * (1 + field.bias)
        for field in fields
    )


def _field_bytes(field: Field, dtype: np.dtype[Any], *, in_mxfp4: bool) -> int:
    if isinstance(field, NormField):
        return field.size * (1 + field.bias) * dtype.itemsize
    if isinstance(field, VectorField):
        return field.size * (4 if field.float32 else dtype.itemsize)
    stays = in_mxfp4 and isinstance(field, ExpertsField)
    format: WeightFormat = BLOCK_FORMATS["MXFP4"] if stays else DenseFormat(dtype)
    return format.nbytes(field.rows, field.columns) + field.bias * field.rows * dtype.itemsize


def build_weights(config: ModelConfig, source: WeightSource, host_layers: HostLayers | None = None) -> Weights:
    """Everything that `source` makes, in the order of the fields; `host_layers` takes some of the layers."""
    linears, norms, _ = _make(model_fields(config), source, None)
    made: list[LayerWeights] = []
    for index in range(config.num_layers):
        layer = build_layer(config, source, index)
        made.append(layer if host_layers is None else host_layers.take(index, layer, source.settle))
        del layer  # it may have left the device
    layers, stream = (tuple(made), None) if host_layers is None else host_layers.streamed(made)
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
        stream=stream,
    )


def build_layer(config: ModelConfig, source: WeightSource, index: int) -> LayerWeights:
    """One layer that `source` makes."""
    spec = config.layers[index]
    kv_scales = source.kv_scales(index, spec.attention.num_kv_heads)
    return _layer(*_make(layer_fields(spec, config.hidden_size), source, index), kv_scales)


def _make(
    fields: Iterator[Field], source: WeightSource, layer: int | None
) -> tuple[dict[str, LinearWeight], dict[str, NormWeights], dict[str, Tensor]]:
    linears: dict[str, LinearWeight] = {}
    norms: dict[str, NormWeights] = {}
    vectors: dict[str, Tensor] = {}
    for field in fields:
        if isinstance(field, MatrixField):
            linears[field.name] = source.linear(field, layer)
        elif isinstance(field, NormField):
            norms[field.name] = source.norm(field, layer)
        else:
            vectors[field.name] = source.vector(field, layer)
    return linears, norms, vectors


def _layer(
    linears: dict[str, LinearWeight],
    norms: dict[str, NormWeights],
    vectors: dict[str, Tensor],
    kv_scales: Tensor | None,
) -> LayerWeights:
    def around(half: str) -> HalfNormWeights:
        places = ("before", "after", "of_sum")
        return HalfNormWeights(*(norms.get(f"{half}_norm_{place}") for place in places))

    q_norm, k_norm = (norms[name].weight if name in norms else None for name in ("q_norm", "k_norm"))
    mlp: MLPWeights | MoEWeights
    if "router" in linears:
        router = linears["router"]
        mlp = MoEWeights(
            router=LinearWeight(router.parts),
            up=linears[EXPERTS_UP],
            down=linears[EXPERTS_DOWN],
            norms=around("mlp"),
            router_bias=router.bias,
            correction=vectors.get("router_correction"),
            shared=(
                MLPWeights(linears["shared_up"], linears["shared_down"], HalfNormWeights())
                if "shared_up" in linears
                else None
            ),
            shared_gate=linears.get("shared_gate"),
        )
    else:
        mlp = MLPWeights(linears["up"], linears["down"], around("mlp"))
    attention = AttentionWeights(
        linears["qkv"], linears["out"], around("attention"), q_norm, k_norm, vectors.get("sinks"), kv_scales
    )
    return LayerWeights(attention, mlp)
