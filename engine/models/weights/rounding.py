"""`--quantization`: the projections of a plain checkpoint, rounded while they load."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tessera.engine.contract.errors import ConfigError
from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.quantised.rounded import RoundedScheme, RoundingName
from tessera.engine.models.quantised.rules import Quantisation, Rule
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.weights.checkpoint_source import PROJECTIONS


def rounded_while_loading(config: ModelConfig, name: RoundingName, folder: Path) -> ModelConfig:
    """The same with projections of its layers quantised; embeddings and head stay as they are.

    Raises: ConfigError where the checkpoint is quantised already.
    """
    stored = "a GGUF file" if is_gguf(folder) else config.quantisation and f"quantised ({config.quantisation.method})"
    if stored:
        raise ConfigError(f"--quantization {name} is for checkpoints in 16 or 32 bits, but {folder} is {stored}")
    architecture = ARCHITECTURES[config.architecture]
    modules = [module for field in PROJECTIONS for module in architecture.weights.get(field, ())]
    if architecture.experts is not None:
        modules += architecture.experts.expert_modules
    names = (re.escape(module).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+") for module in modules)
    patterns = tuple(r"(?:.*\.)?" + name for name in names)
    scheme = RoundedScheme(name, architecture.transposed)
    return replace(config, quantisation=Quantisation(f"--quantization {name}", (Rule(patterns, scheme),)))
