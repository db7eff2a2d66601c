"""Weights of a layer of multi-token prediction; see `engine.models.registry.predictor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.partition import Partition, Rank
from tessera.engine.models.registry import Architecture
from tessera.engine.models.weights.build import NormField, build_layer, predictor_fields
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.dummy import DummySource
from tessera.engine.models.weights.loader import folder_source
from tessera.engine.models.weights.weights import NormWeights, Weights
from tessera.engine.ops.interface import Ops


@dataclass(frozen=True)
class PredictorWeights:
    """Of the layer alone, whose embedding and head are the model's.

    Attributes:
        model: the layer as a model of one layer.
        token_norm, state_norm: before the products below.
        of_tokens, of_states: [H, H] each, the halves of `join`.
    """

    model: Weights
    token_norm: NormWeights
    state_norm: NormWeights
    of_tokens: LinearWeight
    of_states: LinearWeight

    @property
    def own(self) -> Weights:
        """As `model`, with the halves of `join` in the places of embedding and head."""
        return Weights(self.of_tokens, self.model.layers, self.model.final_norm, self.of_states)

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + self.token_norm.weight.nbytes + self.state_norm.weight.nbytes

    @property
    def num_parameters(self) -> int:
        return self.own.num_parameters + self.token_norm.weight.size + self.state_norm.weight.size


def load_predictor(
    path: Path,
    config: ModelConfig,
    architecture: Architecture,
    dtype: np.dtype[Any],
    ops: Ops,
    shared: Weights,
    *,
    states_first: bool,
) -> PredictorWeights:
    """From the model's folder, as `load_weights` reads it. `config` is of the one layer, `architecture` names its
    weights (see `predictor_architecture`), `shared` has embedding and head.

    Raises: as `load_weights`.
    """
    with folder_source(path, config, dtype, ops, architecture=architecture) as source:
        return _build(config, source, shared, states_first=states_first)


def dummy_predictor(
    config: ModelConfig, dtype: np.dtype[Any], ops: Ops, shared: Weights, seed: int
) -> PredictorWeights:
    """Random numbers."""
    source = DummySource(Partition(config, Rank()), dtype, ops, seed, None)
    made = _build(config, source, shared, states_first=False)
    ops.device.synchronize()
    return made


def _build(
    config: ModelConfig, source: CheckpointSource | DummySource, shared: Weights, *, states_first: bool
) -> PredictorWeights:
    hidden = config.hidden_size
    token_norm, state_norm, join = predictor_fields(hidden)
    assert isinstance(token_norm, NormField)
    assert isinstance(state_norm, NormField)
    assert not isinstance(join, NormField)
    first, second = (source.columns(join, slice(start, start + hidden)) for start in (0, hidden))
    model = Weights(
        embedding=shared.embedding,
        layers=(build_layer(config, source, 0),),
        final_norm=source.norm(NormField("final_norm", hidden), None),
        lm_head=shared.lm_head,
    )
    return PredictorWeights(
        model,
        source.norm(token_norm, None),
        source.norm(state_norm, None),
        of_tokens=second if states_first else first,
        of_states=first if states_first else second,
    )
