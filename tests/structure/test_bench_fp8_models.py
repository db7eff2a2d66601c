"""FP8 checkpoints of benchmarks are what the engine takes for such."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.formats import Fp8Format
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.safetensors import SafetensorsFile
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU
from tests.bench import fp8_models, serve, steps
from tests.bench.fp8_models import FP8_CONFIGS, FP8_MODELS, QUANTISATIONS

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("end", "block"), [(".fp8", None), (".fp8-blocks", (128, 128))])
def test_a_checkpoint_is_multiplied_as_it_is_stored(
    end: str, block: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "llama-8b" + end
    monkeypatch.setitem(FP8_CONFIGS, "llama-8b", {**FP8_CONFIGS["llama-8b"], **SMALL})
    monkeypatch.setattr(fp8_models, "PIECE", 1 << 12)
    folder, _ = serve.prepare(name, tmp_path)
    assert serve.prepare(name, tmp_path) == (folder, ("--served-model-name", name))
    runner = ModelRunner(EngineConfig(model=str(folder), num_kv_blocks=8), load_config(folder), CPU, make_ops(CPU))
    formats = {
        part.format
        for layer in runner.weights.layers
        for weight in (layer.attention.qkv, layer.attention.out)
        for part in weight.parts
    }
    assert formats == {Fp8Format(block=block)}
    stored = SafetensorsFile(folder / "model.safetensors")
    read = stored.names - {"model.embed_tokens.weight"}
    assert len(read) == len(stored.names) - 1
    assert serve.step_bytes(name, 1) == sum(stored.tensor(each).nbytes for each in read)


def test_steps_and_loads_take_every_architecture_in_every_form() -> None:
    names = {name + end for name in FP8_CONFIGS for end in QUANTISATIONS}
    assert names == set(FP8_MODELS)
    assert names < set(steps.MODELS)
