"""What each device has of a model whose weights are shared among several: tensor parallelism (Shoeybi et al. 2019).

Projections into a half of a layer are cut by rows and those out of it by columns, so that a half ends with one sum over
the devices. Embedding and head are cut by rows of the vocabulary. Norms, routers and position tables are whole
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.specs import AttentionSpec, LayerSpec, MLPSpec, MoESpec
from tessera.engine.ops.sampling_interface import RANDOM_GROUP

Rows = np.ndarray[Any, np.dtype[np.int64]]
Cut = Literal["vocabulary", "heads", "query_heads", "attended", "inner_rows", "inner_columns", "head_norm"]

# How each weight of `layer_fields` and `model_fields` is cut; those that are not named are whole.
CUTS: dict[str, Cut] = {
    "embedding": "vocabulary",
    "lm_head": "vocabulary",
    "qkv": "heads",
    "out": "attended",
    "sinks": "query_heads",
    "q_norm": "head_norm",
    "k_norm": "head_norm",
    "up": "inner_rows",
    "down": "inner_columns",
    "shared_up": "inner_rows",
    "shared_down": "inner_columns",
    "experts_up": "inner_rows",
    "experts_down": "inner_columns",
}
STEPS = (
    256,
    128,
    64,
    32,
    16,
    8,
    4,
    2,
)  # sizes that shares are multiples of; blocks and groups of formats are among them
LEAST_STEPS = 8  # of a share's size on average, so that the largest is at most an eighth above it


@dataclass(frozen=True)
class Rank:
    """One of `size` devices that share a model."""

    index: int = 0
    size: int = 1


@dataclass(frozen=True)
class Share:
    """A rank's part of a matrix or vector.

    Attributes:
        rows: numbers of its rows, ascending within each fused matrix; of experts those of one. None: all.
        columns: None: all.
        has_bias: a bias that is added to a sum over the ranks is added by the first.
    """

    rows: Rows | None = None
    columns: slice | None = None
    has_bias: bool = True


WHOLE = Share()


def shares(count: int, size: int) -> list[range]:
    """Of elements 0 to count - 1; all ranks have about as many, in the largest step that allows it."""
    step = next((step for step in STEPS if count % step == 0 and count // step >= LEAST_STEPS * size), 1)
    steps = count // step
    return [range(steps * index // size * step, steps * (index + 1) // size * step) for index in range(size)]


def slices_are_groups(vocab_size: int, size: int) -> bool:
    """Whether each rank's share of the vocabulary begins with a whole group of token ids, and has any."""
    return all(share.start % RANDOM_GROUP == 0 and len(share) > 0 for share in shares(vocab_size, size))


class Partition:
    """A model's shares.

    Attributes:
        whole: the model.
        config: as a rank computes it: with its heads, inner elements and vocabulary.
        vocabulary: the token ids of its rows of embedding and head.

    Raises: ConfigError naming what cannot be divided.
    """

    def __init__(self, whole: ModelConfig, rank: Rank) -> None:
        self.whole = whole
        self.rank = rank
        if rank.size > 1:
            self._verify()
        self.vocabulary = self._range(whole.vocab_size)
        layers = tuple(self._layer(spec) for spec in whole.layers)
        self.config = replace(whole, layers=layers, vocab_size=len(self.vocabulary)) if rank.size > 1 else whole

    def _verify(self) -> None:
        whole, size = self.whole, self.rank.size
        option = f"--tensor-parallel-size {size}"
        if whole.is_encoder or whole.classifier is not None:
            raise ConfigError(f"{option} is for models that generate text, not for encoders and classifiers")
        for spec in whole.layers:
            attention = spec.attention
            if attention.num_heads % size:
                raise ConfigError(f"{option} does not divide the model's {attention.num_heads} attention heads")
            uneven = attention.num_kv_heads % size and size % attention.num_kv_heads
            if uneven and attention.qk_norm is not None and attention.qk_norm_form == "width":
                raise ConfigError(
                    f"{option} neither divides the model's {attention.num_kv_heads} key/value heads nor is a multiple "
                    "of them, which a norm over all of them needs"
                )
            mlp = spec.mlp
            halves = [mlp, *([mlp.shared] if isinstance(mlp, MoESpec) and mlp.shared is not None else [])]
            smallest = min(half.inner_size for half in halves)
            if smallest < size:
                raise ConfigError(f"{option} is more than the {smallest} inner elements of the model's MLP")
        if whole.vocab_size < size:
            raise ConfigError(f"{option} is more than the model's {whole.vocab_size} tokens")

    def share(self, name: str, layer: int | None) -> Share:
        """Of the weight called `name` in `Architecture.weights`."""
        if self.rank.size == 1 or name not in CUTS:
            return WHOLE
        cut = CUTS[name]
        if cut == "vocabulary":
            return Share(np.arange(self.vocabulary.start, self.vocabulary.stop))
        assert layer is not None, f"{name} is of a layer"
        spec = self.whole.layers[layer]
        match cut:
            case "heads":
                return Share(self._qkv_rows(spec.attention))
            case "query_heads":
                return Share(self._query_heads(spec.attention))
            case "head_norm":
                return Share(self._norm_rows(spec.attention, name))
            case "attended":
                heads, width = self._query_heads(spec.attention), spec.attention.head_dim
                columns = slice(int(heads[0]) * width, (int(heads[-1]) + 1) * width)
                return Share(columns=columns, has_bias=self._is_first)
            case "inner_rows":
                half = _half(spec, name)
                inner = self._range(half.inner_size)
                parts = half.up_size // half.inner_size
                starts = np.arange(parts)[:, None] * half.inner_size
                return Share((starts + np.arange(inner.start, inner.stop)).ravel())
            case "inner_columns":
                inner = self._range(_half(spec, name).inner_size)
                return Share(columns=slice(inner.start, inner.stop), has_bias=self._is_first)

    def kv_heads(self, layer: int) -> Rows:
        """Numbers of the rank's key/value heads among the layer's."""
        return self._kv_heads(self.whole.layers[layer].attention)

    @cached_property
    def _is_first(self) -> bool:
        return self.rank.index == 0

    def _layer(self, spec: LayerSpec) -> LayerSpec:
        def inner(half: MLPSpec) -> MLPSpec:
            return replace(half, inner_size=len(self._range(half.inner_size)))

        attention, mlp = spec.attention, spec.mlp
        attention = replace(
            attention,
            num_heads=attention.num_heads // self.rank.size,
            num_kv_heads=len(self._kv_heads(attention)),
            out_bias=attention.out_bias and self._is_first,
        )
        if isinstance(mlp, MLPSpec):
            return replace(spec, attention=attention, mlp=replace(inner(mlp), down_bias=self._down_bias(mlp)))
        shared = mlp.shared if mlp.shared is None else replace(inner(mlp.shared), down_bias=self._down_bias(mlp.shared))
        size = len(self._range(mlp.inner_size))
        mixture = replace(mlp, inner_size=size, shared=shared, down_bias=self._down_bias(mlp))
        return replace(spec, attention=attention, mlp=mixture)

    def _down_bias(self, half: MLPSpec | MoESpec) -> bool:
        return half.down_bias and self._is_first

    def _range(self, count: int) -> range:
        return shares(count, self.rank.size)[self.rank.index]

    def _query_heads(self, spec: AttentionSpec) -> Rows:
        count = spec.num_heads // self.rank.size
        return np.arange(self.rank.index * count, (self.rank.index + 1) * count)

    def _kv_heads(self, spec: AttentionSpec) -> Rows:
        """Those that the rank's query heads use, each as often as all have equally many query heads."""
        group, heads = spec.num_heads // spec.num_kv_heads, self._query_heads(spec)
        return heads[:: np.gcd(group, len(heads))] // group

    def _qkv_rows(self, spec: AttentionSpec) -> Rows:
        kv_heads = self._kv_heads(spec)
        firsts = (self._query_heads(spec), spec.num_heads + kv_heads, spec.num_heads + spec.num_kv_heads + kv_heads)
        return _elements(np.concatenate(firsts), spec.head_dim)

    def _norm_rows(self, spec: AttentionSpec, name: str) -> Rows | None:
        if spec.qk_norm_form in ("head", "rotated_head"):
            return None
        return _elements(self._query_heads(spec) if name == "q_norm" else self._kv_heads(spec), spec.head_dim)


def _half(spec: LayerSpec, name: str) -> MLPSpec | MoESpec:
    if name.startswith("shared_"):
        assert isinstance(spec.mlp, MoESpec), f"{name} is of a mixture"
        assert spec.mlp.shared is not None, f"{name} is of a shared expert"
        return spec.mlp.shared
    return spec.mlp


def _elements(heads: Rows, head_dim: int) -> Rows:
    return np.asarray(heads[:, None] * head_dim + np.arange(head_dim)).ravel()
