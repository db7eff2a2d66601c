"""Models that score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.engine.contract.config import EngineConfig
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.embedding_runner import EncoderRunner
from tessera.engine.runner.head import ClassifierHead
from tessera.engine.runner.scorer import Scorer
from tessera.engine.tensor import CPU


def encoder(folder: Path, **settings: Any) -> EncoderRunner:
    config = EngineConfig(model=str(folder), **settings).with_device_defaults("cpu")
    return EncoderRunner(config, load_config(folder), folder, CPU, make_ops(CPU))


def scorer(folder: Path, **settings: Any) -> Scorer:
    runner, spec = encoder(folder, **settings), load_config(folder).classifier
    assert spec is not None
    assert runner.classifier is not None
    return Scorer(runner, ClassifierHead(spec, runner.classifier), spec.pooling)
