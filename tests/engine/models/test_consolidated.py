"""Folders in Mistral's own form: params.json and consolidated.safetensors, without config.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.models.config import load_config, read_model_config
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tessera.engine.training.parameters import load_parameters
from tests.support.decoder_harness import DecoderHarness
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build, make_tensors, write_safetensors

Array = np.ndarray[Any, Any]
MODEL = TINY_MODELS["mistral"]
PROMPT = [1, 5, 9, 2, 30, 7]
KEYS = {
    **{
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "head_dim": "head_dim",
        "hidden_dim": "intermediate_size",
    },
    **{"n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"},
    **{"vocab_size": "vocab_size", "rope_theta": "rope_theta"},
}
PARAMS = {key: MODEL.config[name] for key, name in KEYS.items() if name in MODEL.config}
NAMES = {
    **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers"},
    **{f"self_attn.{part}_proj": f"attention.w{part}" for part in "qkvo"},
    **{"mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
}


def consolidated(tensors: dict[str, Array]) -> dict[str, Array]:
    """By Mistral's names; elements (i, i + D / 2) of a head of queries or keys become (2 i, 2 i + 1)."""
    found = {}
    for name, values in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = values.reshape(-1, 2, MODEL.config["head_dim"] // 2, *values.shape[1:])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        for theirs, own in NAMES.items():
            name = name.replace(theirs, own)
        found[name] = np.ascontiguousarray(values)
    return found


def write(folder: Path, model: TinyModel = MODEL, **params: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps({**PARAMS, **params}))
    tensors = consolidated(make_tensors(model))
    write_safetensors(folder / "consolidated.safetensors", {**tensors, "vision_encoder.norm.weight": np.ones(4)})
    return folder


def logits(folder: Path) -> Array:
    return DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=64).logits(PROMPT)


def test_the_model_has_the_logits_that_it_has_in_hugging_faces_form(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(build(MODEL, tmp_path / "theirs"))
    folder = write(tmp_path / "own", vision_encoder={"hidden_size": 4}, model_type="transformer", dtype="float32")
    np.testing.assert_array_equal(logits(folder), expected)
    assert "has a part that sees: its language model is served, for text alone" in caplog.text
    assert "left out" not in caplog.text


def test_a_tied_model_has_no_head(tmp_path: Path) -> None:
    tied = dataclasses.replace(MODEL, config={**MODEL.config, "tie_word_embeddings": True})
    own = write(tmp_path / "own", tied, tied_embeddings=True)
    np.testing.assert_array_equal(logits(own), logits(build(tied, tmp_path / "theirs")))


def test_the_weights_may_be_in_several_files(tmp_path: Path) -> None:
    expected = logits(write(tmp_path))
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "consolidated-00001-of-00001.safetensors")
    with pytest.raises(ModelError, match=r"has neither consolidated\.safetensors nor consolidated\.safetensors\.index"):
        logits(tmp_path)
    names = [*consolidated(make_tensors(MODEL)), "vision_encoder.norm.weight"]
    index = {"weight_map": dict.fromkeys(names, "consolidated-00001-of-00001.safetensors")}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(logits(tmp_path), expected)


def test_what_params_json_leaves_open(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert (config.max_position_embeddings, config.eos_token_ids, config.bos_token_id) == (128_000, (2,), 1)
    assert config.layers[0].attention.sliding_window is None
    assert not config.tie_word_embeddings
    config = read_model_config(write(tmp_path, max_seq_len=64, sliding_window=16, tied_embeddings=True))
    assert (config.max_position_embeddings, config.layers[0].attention.sliding_window) == (64, 16)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"dim": None}, r"params\.json: dim is missing"),
        ({"dim": -1}, r"params\.json: hidden_size must be an integer"),
        ({"moe": {"num_experts": 8}}, r"params\.json: moe is {.*}, which is not supported in this form"),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3"}},
            "quantization is .* get the model's version with config.json",
        ),
        ({"yarn": {"factor": 4}}, "yarn is .* not supported"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling is .* not supported"),
        ({"q_lora_rank": 4}, "q_lora_rank is 4, which is not supported"),
        ({"model_type": "mamba"}, 'model_type is "mamba", which is not supported'),
        ({"use_biases": True}, "use_biases is true, which is not supported"),
        ({"sliding_window": [16, None]}, "sliding_window must be an integer"),
        ({"multiple_of": 256}, "multiple_of is 256, which is not supported"),
    ],
)
def test_what_the_forward_does_not_do_is_refused_by_its_key(tmp_path: Path, params: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        load_config(write(tmp_path, **params))


def test_config_json_goes_before(tmp_path: Path) -> None:
    write(tmp_path)
    build(MODEL, tmp_path)
    (tmp_path / "params.json").write_text("{}")
    assert read_model_config(tmp_path).layers[0].attention.sliding_window is None


def test_training_needs_the_other_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is in Mistral's own form; models are trained from"):
        load_parameters(write(tmp_path), make_ops(CPU))
