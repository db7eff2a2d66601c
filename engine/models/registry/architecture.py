"""An entry of the table of architectures: in what it departs from Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from tessera.engine.models.fields import Fields
from tessera.engine.models.registry.experts import ExpertsRule
from tessera.engine.models.registry.predictor import PredictorRule
from tessera.engine.models.specs import AttentionSpec, HeadActivation, HeadNormForm, PoolingKind

PositionRule = Callable[[Fields], int]
KeyRule = Callable[[Fields], Any]
RopeRule = Callable[[Fields, int], tuple[bool, ...]]
RowOrder = Callable[[AttentionSpec], np.ndarray[Any, np.dtype[np.int64]]]
WindowRule = Callable[[Fields, tuple[bool, ...]], tuple[int | None, ...]]

NormPlace = Literal["before", "after", "of_sum"]

# Modules whose `.weight` (and `.bias`) make up each fused weight, top to bottom; `{i}` is the layer.
WeightNames = dict[str, tuple[str, ...]]


class RopeKeys(NamedTuple):
    """Where config.json has a RoPE of some layers: a section of rope_parameters, or the older key of its theta, with
    what rope_scaling says if it is `scaled`."""

    section: str
    theta: str
    scaled: bool = True


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
        weights: modules that make up each fused weight (see `tessera.engine.models.weights.build`); `{h}` stands for
            each of the heads in turn.
        other_weights: names that checkpoints may have instead.
        base_classes: other classes of the same layers, in folders saved without a head or with another spelling.
        prefixes: put before every name but the head's; the first that occurs in the folder counts.
        defaults: what config.json need not say, as Hugging Face transformers fills it in.
        defaults_if_absent: the same for keys where null means none.
        keys: config keys that are called otherwise here.
        aliases: other names of config keys to those read here; the first that config.json has counts.
        derived: keys that are computed of others where config.json has none, in this order.
        refused: config keys that must be false or absent, and what they would call for.
        required: what config keys must be that may be absent.
        norm: the kind of all norms.
        norm_bias: whether LayerNorms have a bias, or the config key that says so.
        norm_weights: whether norms have weights in the checkpoint; if not they are ones.
        norm_offset: norms are stored as what their weights differ from 1 by.
        bare_start: the first layer's attention has no norm before it.
        norm_places: of the norms around each half of a layer, see `HalfNorms`.
        gated: the MLP multiplies a gate, activation(gate) * up; else it is activation(up).
        learned_positions: a table of position embeddings instead of RoPE.
        first_position: row of that table for the first token of a text.
        skipped_positions: rows of that table before it that nothing refers to, and the context length leaves out.
        token_types: a table of token types is added to the embedding.
        experts: what its mixtures of experts are, if there are any.
        predictor: what its layers of multi-token prediction are, if checkpoints may have any.
        qk_norm, qk_norm_form: whether queries and keys pass a norm, or the config key that says so, and of which form;
            see `AttentionSpec`.
        sinks: attention has a sink for each query head.
        qkv_order: which row of a checkpoint's fused qkv each row is; None has queries, keys and values in that order.
        rope_interleaved: neighbouring elements of a head rotate together, instead of its halves.
        qkv_bias, out_bias, mlp_bias, head_bias: whether projections have one, or the config key that says so.
        normalised_head: whether the head's rows are scaled to length 1, or the config key that says so.
        parallel: whether attention and MLP both see the layer's input, or the config key that says so.
        parallel_norms: whether they do through a norm each instead of one for both, or the config key that says so.
        embedding_multiplier, residual_multiplier, attention_multiplier, logits_divisor: config keys of numbers.
        embedding_rounded: that multiplier is rounded to the dtype of the embeddings.
        attention_soft_cap, logits_soft_cap: config keys of numbers; null caps nothing.
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
    other_weights: WeightNames = field(default_factory=dict)
    base_classes: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    defaults: dict[str, Any] = field(default_factory=dict)
    defaults_if_absent: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    derived: dict[str, KeyRule] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    required: dict[str, KeyRule] = field(default_factory=dict)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool | str = True
    norm_places: tuple[NormPlace, ...] = ("before",)
    norm_weights: bool = True
    norm_offset: bool = False
    bare_start: bool = False
    gated: bool = True
    learned_positions: bool = False
    first_position: PositionRule = lambda config: 0
    skipped_positions: int = 0
    token_types: bool = False
    experts: ExpertsRule | None = None
    predictor: PredictorRule | None = None
    qk_norm: bool | str = False
    qk_norm_form: HeadNormForm = "head"
    sinks: bool = False
    qkv_order: RowOrder | None = None
    rope_interleaved: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    normalised_head: str | None = None
    parallel: bool | str = False
    parallel_norms: bool | str = False
    embedding_multiplier: str | None = None
    embedding_rounded: bool = False
    residual_multiplier: str | None = None
    attention_multiplier: str | None = None
    logits_divisor: str | None = None
    attention_soft_cap: str | None = None
    logits_soft_cap: str | None = None
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
