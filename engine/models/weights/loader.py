"""Weights of a model folder or a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.consolidated.names import CONSOLIDATED
from tessera.engine.models.consolidated.params import is_consolidated
from tessera.engine.models.offload.host_layers import HostLayers
from tessera.engine.models.partition import Rank
from tessera.engine.models.registry import Architecture
from tessera.engine.models.weights.build import Progress, build_weights
from tessera.engine.models.weights.checkpoint_source import CheckpointSource
from tessera.engine.models.weights.gguf_checkpoint import GGUFCheckpoint
from tessera.engine.models.weights.gguf_source import GGUFSource
from tessera.engine.models.weights.quantised_checkpoint import QuantisedCheckpoint
from tessera.engine.models.weights.quantised_source import QuantisedSource
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.models.weights.text_part import TextPart
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.interface import Ops


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: np.dtype[Any],
    ops: Ops,
    progress: Progress | None = None,
    *,
    host_layers: HostLayers | None = None,
    rank: Rank | None = None,
) -> Weights:
    """The weights on the device of `ops`, part by part: host memory holds one chunk, and what `host_layers` takes.

    The head is tied or not as the checkpoint has it, whatever config.json says. Extra tensors are left out, which the
    log says. Weights of a folder in 16 or 32 bits are in `dtype`. Those of a GGUF file stay in their blocks where `ops`
    can multiply these, and those of a quantised folder in the format that is nearest to theirs. With a `rank` they are
    its shares (see `Partition`), and nothing else is read.

    Raises: ModelError naming the tensors that are missing, quantised, mis-shaped or not
    representable in `dtype`; OutOfMemoryError.
    """
    if is_gguf(path):
        source: CheckpointSource = GGUFSource(GGUFCheckpoint(path), config, dtype, ops, progress, rank)
    else:
        named = CONSOLIDATED if is_consolidated(path) else None
        source = folder_source(path, config, dtype, ops, progress, rank, named)
    with source:
        return replace(build_weights(source.config, source, host_layers), has_head=source.has_head)


def folder_source(
    path: Path,
    config: ModelConfig,
    dtype: np.dtype[Any],
    ops: Ops,
    progress: Progress | None = None,
    rank: Rank | None = None,
    architecture: Architecture | None = None,
) -> CheckpointSource:
    """Of a model folder, whose weights `architecture` names; None: the configuration's."""
    checkpoint = Checkpoint(path)
    stored = TextPart(checkpoint) if config.is_text_part else checkpoint
    if config.quantisation is None:
        return CheckpointSource(stored, config, dtype, ops, progress, rank, architecture)
    quantised = QuantisedCheckpoint(stored, config.quantisation)
    return QuantisedSource(quantised, config, dtype, ops, progress, rank, architecture)
