"""An entry of the table of architectures: in what it departs from Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tessera.engine.models.fields import Fields

RopeRule = Callable[[Fields, int], tuple[bool, ...]]
WindowRule = Callable[[Fields, tuple[bool, ...]], tuple[int | None, ...]]

NormPlace = Literal["before", "after", "of_sum"]

# Modules whose `.weight` (and `.bias`) make up each fused weight, top to bottom; `{i}` is the layer.
WeightNames = dict[str, tuple[str, ...]]


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
        refused: config keys that must be false or absent, and what they would call for.
        norm: `layernorm` has a bias as well.
        norm_places: of the norms around each half of a layer, see `HalfNorms`.
        gated: the MLP multiplies a gate, activation(gate) * up; else it is activation(up).
        learned_positions: a table of position embeddings instead of RoPE.
        qk_norm: queries and keys pass an RMSNorm per head.
        qkv_bias, out_bias, mlp_bias: whether projections have one, or the config key that says so.
        parallel: whether attention and MLP both see the layer's input through one norm, or the config key that
            says so.
        embedding_multiplier, residual_multiplier, attention_multiplier, logits_divisor: config keys of numbers.
        transposed: projections are stored [in, out].
        encoder: tokens see the whole text, and there is no head: it makes embeddings, not text.
        rope_aliases: other names of rope types, to ours.
        rope_layers: which layers rotate queries and keys.
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
    refused: dict[str, str] = field(default_factory=dict)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_places: tuple[NormPlace, ...] = ("before",)
    gated: bool = True
    learned_positions: bool = False
    qk_norm: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    parallel: bool | str = False
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    attention_multiplier: str | None = None
    logits_divisor: str | None = None
    transposed: bool = False
    encoder: bool = False
    rope_aliases: dict[str, str] = field(default_factory=dict)
    rope_layers: RopeRule = lambda config, num_layers: (True,) * num_layers
    windows: WindowRule = lambda config, rope_layers: (None,) * len(rope_layers)
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)

    def key(self, name: str) -> str:
        return self.keys.get(name, name)
