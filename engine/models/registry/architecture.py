"""An entry of the table of architectures: in what it departs from Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tessera.engine.models.fields import Fields
from tessera.engine.models.registry.experts import ExpertsRule
from tessera.engine.models.specs import HeadActivation, PoolingKind

KeyRule = Callable[[Fields], Any]
PositionRule = Callable[[Fields], int]
RopeKeys = tuple[str, str]  # section of rope_parameters, and the older key of its theta
RopeRule = Callable[[Fields, int], tuple[bool, ...]]
WindowRule = Callable[[Fields, tuple[bool, ...]], tuple[int | None, ...]]

NormPlace = Literal["before", "after", "of_sum"]

# Modules whose `.weight` (and `.bias`) make up each fused weight, top to bottom; `{i}` is the layer.
WeightNames = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ClassifierRule:
    """The head of an architecture's classes for sequence classification; see `ClassifierSpec`.

    Attributes:
        classes: their names in config.json.
        pooling: of token vectors, unless the config key `pooling_key` says it.
        activation: of the dense layer, unless the config key `activation_key` says it; None where there is no such
            layer.
        dense: name of the dense layer in `Architecture.weights`.
        dense_bias: whether that has a bias, or the config key that says so.
        norm: the dense layer is followed by a norm like those of the layers.
        bias: whether the last projection has one.
    """

    classes: tuple[str, ...]
    pooling: PoolingKind = "cls"
    pooling_key: str | None = None
    activation: HeadActivation | None = None
    activation_key: str | None = None
    dense: Literal["classifier_dense", "pooler"] = "classifier_dense"
    dense_bias: bool | str = True
    norm: bool = False
    bias: bool = True


@dataclass(frozen=True)
class Architecture:
    """One entry of the table.

    Attributes:
        model_type: its name in config.json beside `architectures`.
        weights: modules that make up each fused weight (see `tessera.engine.models.weights.build`).
        base_classes: other classes of the same layers, in folders saved without a head or with another spelling.
        prefixes: put before every name but the head's; the first that occurs in the folder counts.
        defaults: what config.json need not say, as Hugging Face transformers fills it in.
        defaults_if_absent: the same for keys where null means none.
        keys: config keys that are called otherwise here.
        aliases: other names of config keys to those read here; the first that config.json has counts.
        refused: config keys that must be false or absent, and what they would call for.
        required: what config keys must be that may be absent.
        norm: the kind of all norms.
        norm_bias: whether LayerNorms have a bias, or the config key that says so.
        bare_start: the first layer's attention has no norm before it.
        norm_places: of the norms around each half of a layer, see `HalfNorms`.
        gated: the MLP multiplies a gate, activation(gate) * up; else it is activation(up).
        learned_positions: a table of position embeddings instead of RoPE.
        first_position: row of that table for the first token of a text.
        token_types: a table of token types is added to the embedding.
        experts: what its mixtures of experts are, if there are any.
        qk_norm: whether queries and keys pass an RMSNorm per head, or the config key that says so.
        sinks: attention has a sink for each query head.
        qkv_bias, out_bias, mlp_bias, head_bias: whether projections have one, or the config key that says so.
        parallel: whether attention and MLP both see the layer's input through one norm, or the config key that
            says so.
        embedding_multiplier, residual_multiplier, attention_multiplier, logits_divisor: config keys of numbers.
        transposed: projections are stored [in, out].
        encoder: tokens see both sides of their text, and no head makes text.
        classifier: its head for sequence classification.
        rope_aliases: other names of rope types, to ours.
        rope_layers: which layers rotate queries and keys.
        window_rope: the RoPE of layers without a window, and of those with one, where they differ.
        windows: each layer's sliding window, None is full attention.
        ignored: patterns of tensors that are no weights (buffers that some savers left in).
    """

    model_type: str
    weights: WeightNames
    base_classes: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    defaults: dict[str, Any] = field(default_factory=dict)
    defaults_if_absent: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    required: dict[str, KeyRule] = field(default_factory=dict)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool | str = True
    norm_places: tuple[NormPlace, ...] = ("before",)
    bare_start: bool = False
    gated: bool = True
    learned_positions: bool = False
    first_position: PositionRule = lambda config: 0
    token_types: bool = False
    experts: ExpertsRule | None = None
    qk_norm: bool | str = False
    sinks: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    parallel: bool | str = False
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    attention_multiplier: str | None = None
    logits_divisor: str | None = None
    transposed: bool = False
    encoder: bool = False
    classifier: ClassifierRule | None = None
    rope_aliases: dict[str, str] = field(default_factory=dict)
    rope_layers: RopeRule = lambda config, num_layers: (True,) * num_layers
    window_rope: tuple[RopeKeys, RopeKeys] | None = None
    windows: WindowRule = lambda config, rope_layers: (None,) * len(rope_layers)
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)

    def key(self, name: str) -> str:
        return self.keys.get(name, name)
