"""Models that score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.engine.models.config import load_config
from tessera.engine.runner.head import ClassifierHead
from tessera.engine.runner.scorer import Scorer
from tests.engine.golden.embedders import encoder


def scorer(folder: Path, **settings: Any) -> Scorer:
    runner, spec = encoder(folder, **settings), load_config(folder).classifier
    assert spec is not None
    assert runner.classifier is not None
    return Scorer(runner, ClassifierHead(spec, runner.classifier), spec.pooling)
