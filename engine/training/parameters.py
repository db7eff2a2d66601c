"""A decoder's parameters: variables fused as the forward wants them, and their tensors by the names of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.autograd.variable import Variable
from tessera.engine.contract.errors import ConfigError
from tessera.engine.formats import LinearWeight
from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.consolidated.params import is_consolidated
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.specs import MoESpec
from tessera.engine.models.weights.build import Field, MatrixField, NormField, layer_fields, model_fields
from tessera.engine.models.weights.checkpoint_source import HEADS, PROJECTIONS, CheckpointSource
from tessera.engine.models.weights.quantised_checkpoint import QuantisedCheckpoint
from tessera.engine.models.weights.quantised_source import QuantisedSource
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float32, from_numpy

NARROW = ("out", "down")  # projections that add to the residual stream
ACTIVATIONS = ("silu_mul", "gelu_tanh_mul", "gelu_erf_mul", "gelu_tanh", "gelu_erf")  # that have a backward
INITIAL_STD = 0.02  # Radford et al. 2019; of narrow ones divided by sqrt(2 layers)

Key = tuple[int | None, str, str]  # layer (None: outside of layers), name of the field, "weight" or "bias"


@dataclass(eq=False)
class Parameter:
    """A weight or bias.

    Attributes:
        variable: [rows of all parts, columns] or [size].
        parts: name in a checkpoint, and rows, of each tensor that is fused in it, top to bottom.
        transposed: checkpoints have it as [columns, rows].
    """

    name: str
    variable: Variable
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices."""
        return len(self.variable.shape) == 2

    @property
    def is_projection(self) -> bool:
        """Whether it is a matrix that is multiplied by and not looked up: no embedding, and no head."""
        return self.decays and "embed" not in self.name and "lm_head" not in self.name

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors; views of the value, but for transposed ones."""
        start = 0
        for name, rows in self.parts:
            part = self.variable.value[start : start + rows]
            start += rows
            yield name, from_numpy(part.numpy().T.copy(), part.device) if self.transposed else part


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A weight with its bias that is not trained; `parts` as of a Parameter."""

    weight: LinearWeight
    parts: tuple[tuple[str, int], ...]


class Parameters:
    """All parameters of a decoder by layer, field and kind.

    Attributes:
        quantised: matrices that are none, by layer and field.
    """

    def __init__(
        self,
        config: ModelConfig,
        by_key: dict[Key, Parameter],
        quantised: dict[tuple[int | None, str], QuantisedMatrix] | None = None,
    ) -> None:
        self.config = config
        self.by_key = by_key
        self.quantised = quantised or {}

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.by_key.values())

    def variable(self, layer: int | None, field: str, kind: str = "weight") -> Variable:
        return self.by_key[layer, field, kind].variable

    def optional(self, layer: int | None, field: str, kind: str = "weight") -> Variable | None:
        found = self.by_key.get((layer, field, kind))
        return None if found is None else found.variable

    def freeze(self) -> None:
        """None of them gets gradients."""
        for parameter in self:
            parameter.variable.requires_grad = False

    @property
    def num_parameters(self) -> int:
        return sum(parameter.variable.value.size for parameter in self)

    def stored(self) -> dict[str, Tensor]:
        """Tensors by their names in a checkpoint."""
        return dict(pair for parameter in self for pair in parameter.stored())


class _Source(ABC):
    """Gives the value of one field after the other."""

    @abstractmethod
    def values(self, field: Field, layer: int | None) -> dict[str, Tensor] | LinearWeight:
        """By kind, or a matrix that is quantised."""


class _Stored(_Source):
    """Quantised embeddings and heads become dense: they are looked up, and multiplied in chunks."""

    def __init__(self, source: CheckpointSource, ops: Ops) -> None:
        self._source = source
        self._ops = ops

    def values(self, field: Field, layer: int | None) -> dict[str, Tensor] | LinearWeight:
        if isinstance(field, MatrixField):
            linear = self._source.linear(field, layer)
            weight, bias = linear.dense, linear.bias
            if weight is None and layer is None:
                weight = self._ops.dequantize(linear, self._source.dtype).clone()
            if weight is None:
                return linear
        else:
            assert isinstance(field, NormField), "only mixtures have other vectors"
            norm = self._source.norm(field, layer)
            weight, bias = norm.weight, norm.bias
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


class _Initial(_Source):
    """Normal matrices, norms of 1, biases of 0."""

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any], ops: Ops, seed: int) -> None:
        self._narrow_std = INITIAL_STD / (2 * config.num_layers) ** 0.5
        self._dtype, self._ops, self._seed = dtype, ops, seed
        self._made = 0

    def values(self, field: Field, layer: int | None) -> dict[str, Tensor]:
        if isinstance(field, MatrixField):
            weight = empty((field.rows, field.columns), self._dtype, self._ops.device)
            std = self._narrow_std if field.name in NARROW else INITIAL_STD
            self._ops.fill_normal(weight, std=std, seed=((self._seed << 20) + self._made) % 2**64)
            self._made += 1
            size = field.rows
        else:
            weight, size = self._full(field.size, 1), field.size
        return {"weight": weight, "bias": self._full(size, 0)} if field.bias else {"weight": weight}

    def _full(self, size: int, value: float) -> Tensor:
        return from_numpy(np.full(size, value, self._dtype), self._ops.device)


def load_parameters(folder: Path, ops: Ops, dtype: np.dtype[Any] = float32) -> Parameters:
    """Those of a model folder in `dtype`, all of which require gradients; quantised matrices are none.

    Raises: ConfigError where the model cannot be trained; ModelError as `load_weights`.
    """
    if is_gguf(folder):
        raise ConfigError(f"{folder} is a GGUF file; models are trained from folders with safetensors")
    if is_consolidated(folder):
        raise ConfigError(f"{folder} is in Mistral's own form; models are trained from folders with config.json")
    config = load_config(folder)
    check_trainable(config, str(folder))
    checkpoint = Checkpoint(folder)
    if config.quantisation is None:
        opened = CheckpointSource(checkpoint, config, dtype, ops, None)
    else:
        opened = QuantisedSource(QuantisedCheckpoint(checkpoint, config.quantisation), config, dtype, ops, None)
    with opened as source:
        if not source.has_head:
            raise ConfigError(f"{folder} has no head, so it makes embeddings, not text, and cannot be trained")
        return _collect(source.config, _Stored(source, ops))


def initial_parameters(config: ModelConfig, ops: Ops, dtype: np.dtype[Any] = float32, *, seed: int) -> Parameters:
    """Random ones, equal for equal seeds. Raises: ConfigError where the model cannot be trained."""
    check_trainable(config, "the model")
    return _collect(config, _Initial(config, dtype, ops, seed))


def check_trainable(config: ModelConfig, source: str) -> None:
    """Raises: ConfigError with the reason why a model cannot be trained."""
    architecture = ARCHITECTURES[config.architecture]
    attentions = [layer.attention for layer in config.layers]
    reasons = {
        "is an encoder": config.is_encoder,
        "is a classifier": config.classifier is not None,
        "is a mixture of experts": any(isinstance(layer.mlp, MoESpec) for layer in config.layers),
        "is part of a multimodal model": config.is_text_part,
        "limits its logits": config.logits_soft_cap is not None,
        "limits its attention scores": any(spec.soft_cap is not None for spec in attentions),
        "has norms of queries and keys of another form than a weight for all heads before the rotation": any(
            spec.qk_norm is not None and spec.qk_norm_form != "head" for spec in attentions
        ),
        "has an MLP with ReLU": any(layer.mlp.activation not in ACTIVATIONS for layer in config.layers),
        "has a head with a bias": config.head_bias,
        "has a head that is normalised": config.head_normalised,
        "rounds the multiplier of its embeddings": config.embedding_rounded,
        "has norms without weights": not architecture.norm_weights,
        "stores norms as differences from 1": architecture.norm_offset,
        "skips positions": architecture.skipped_positions > 0,
        "stores queries, keys and values in another order": architecture.qkv_order is not None
        or architecture.rope_interleaved,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"{source} {reason}, and such a model cannot be trained here")


def _collect(config: ModelConfig, source: _Source) -> Parameters:
    found: dict[Key, Parameter] = {}
    quantised: dict[tuple[int | None, str], QuantisedMatrix] = {}
    fields: list[tuple[Field, int | None]] = [(field, None) for field in model_fields(config)]
    for layer, spec in enumerate(config.layers):
        fields += [(field, layer) for field in layer_fields(spec, config.hidden_size)]
    for field, place in fields:
        values = source.values(field, place)
        if isinstance(values, LinearWeight):
            quantised[place, field.name] = _quantised(config, field, place, values)
            continue
        for kind, value in values.items():
            name = f"{field.name}.{kind}" if place is None else f"{place}.{field.name}.{kind}"
            parts, transposed = _stored_parts(config, field, kind, place)
            found[place, field.name, kind] = Parameter(name, Variable(value, requires_grad=True), parts, transposed)
    return Parameters(config, found, quantised)


def _quantised(config: ModelConfig, field: Field, layer: int | None, weight: LinearWeight) -> QuantisedMatrix:
    parts, _ = _stored_parts(config, field, "weight", layer)
    if weight.order is not None:
        reason = "has columns in another order (act-order), and such a model cannot be trained here"
        raise ConfigError(f"{parts[0][0]} {reason}")
    return QuantisedMatrix(weight, parts)


def _stored_parts(
    config: ModelConfig, field: Field, kind: str, layer: int | None
) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Names and rows in a checkpoint, and whether matrices are stored transposed there."""
    architecture = ARCHITECTURES[config.architecture]
    prefix = "" if field.name in HEADS else architecture.prefixes[0]
    names = [f"{prefix}{module.format(i=layer)}.{kind}" for module in architecture.weights[field.name]]
    if isinstance(field, MatrixField):
        rows: Sequence[int] = field.part_rows if len(names) > 1 else (field.rows,)
    else:
        rows = (field.size,)
    transposed = architecture.transposed and field.name in PROJECTIONS and kind == "weight"
    return tuple(zip(names, rows, strict=True)), transposed
