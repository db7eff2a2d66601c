"""`--prompt-activations int8`: the steps that it rounds, and how far."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.models.config import load_config
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.int8.ops import FEW_ROWS
from tessera.engine.ops.cuda.int8.sm90 import SM90_INT8_MATMUL
from tessera.engine.runner.model_runner import ModelRunner
from tests.support.decoder_harness import Row, scattered_blocks, step_batch
from tests.support.models.tiny_models import TINY_MODELS

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
SETTINGS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "num_kv_blocks": 40,
    "dtype": "bfloat16",
    "load_format": "dummy",
    "quantization": "int4",
    "enforce_eager": True,
}
MOST = 0.05  # of a log-probability's difference


@pytest.mark.parametrize("length", [FEW_ROWS, FEW_ROWS + 40])
def test_long_steps_are_rounded_a_little(length: int, tmp_path: Path, cuda_device: CudaDevice) -> None:
    if not SM90_INT8_MATMUL.supports(cuda_device.arch):
        pytest.skip("the kernel is for sm_90a")
    if os.environ.get("TESSERA_EMULATED") == "1":
        pytest.skip("weights stay as the CPU has them")
    (tmp_path / "config.json").write_text(json.dumps({**TINY_MODELS["llama"].config, **SIZES}))
    model = load_config(tmp_path)
    prompt = np.random.default_rng(1).integers(0, model.vocab_size, length).tolist()
    found = []
    for activations in ("16bit", "int8"):
        config = EngineConfig(model=str(tmp_path), prompt_activations=activations, **SETTINGS)
        runner = ModelRunner(config, model, cuda_device, CudaOps(cuda_device))
        params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=8)
        rows = [Row(slot=0, blocks=scattered_blocks(-(-(length + 9) // BLOCK_SIZE)), prompt=prompt, params=params)]
        result = runner.execute(step_batch(rows, BLOCK_SIZE))
        assert result.logprobs is not None
        assert result.logprobs[0] is not None
        found.append(dict(zip(result.logprobs[0].top_token_ids, result.logprobs[0].top_logprobs, strict=True)))
    exact, rounded = found
    if length <= FEW_ROWS:
        assert rounded == exact
        return
    common = exact.keys() & rounded.keys()
    differences = [abs(exact[token] - rounded[token]) for token in common]
    assert len(common) >= 4
    assert 0 < max(differences) < MOST
