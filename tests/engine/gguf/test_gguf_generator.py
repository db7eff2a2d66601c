"""The benchmark's random GGUF files: the layout of Q4_K_M, at a size that a test can write."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tessera.engine.gguf.model import open_gguf
from tessera.engine.gguf.tokenizer import read_gguf_tokenizer
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.gguf_checkpoint import GGUFCheckpoint
from tests.bench import gguf_models


@pytest.mark.parametrize("name", gguf_models.GGUF_CONFIGS)
def test_random_files_are_models_of_their_architecture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    monkeypatch.setitem(gguf_models.GGUF_CONFIGS, name, {**gguf_models.GGUF_CONFIGS[name], **small, **heads})
    path = gguf_models.write_gguf_model(tmp_path / "m.gguf", name)
    assert load_config(path).num_layers == 8
    assert set(open_gguf(path).count_types()) == {"Q4_K", "Q6_K", "F32"}
    assert read_gguf_tokenizer(path) is not None
    checkpoint = GGUFCheckpoint(path)
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        values = checkpoint.tensor(f"model.layers.0.{part}.weight")[:]
        assert 0.01 < values.std() < 0.04
        assert abs(values.mean()) < 0.005
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    ours = open_gguf(path)
    assert theirs.keys() == ours.tensors.keys()
    for tensor_name, tensor in theirs.items():
        assert np.array_equal(tensor.data.view(np.uint8).ravel(), ours.stored(tensor_name).ravel())
