"""Folders of multimodal models: their language model is served, for text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.config import load_config, read_model_config
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.decoder_harness import DecoderHarness
from tests.support.models.tiny_models import TINY_MODELS, build, make_tensors, write_safetensors

Array = np.ndarray[Any, Any]
PROMPT = [1, 5, 9, 2, 30, 7]

# How savers name the language model's tensors: what stands before them, in place of what; and before the head.
NAMES = [
    ("language_model.", "", "language_model."),
    ("model.language_model.", "model.", ""),
    ("model.text_model.", "model.", ""),
    ("", "", ""),
]


def wrapped(folder: Path, base: str, names: tuple[str, str, str], config: dict[str, Any]) -> Path:
    """A tiny model inside of one that sees."""
    model = TINY_MODELS[base]
    build(model, folder)
    prefix, replaced, head_prefix = names
    tensors = {
        head_prefix + name if name.startswith("lm_head") else prefix + name.removeprefix(replaced): values
        for name, values in make_tensors(model).items()
    }
    tensors["visual.blocks.0.attn.qkv.weight"] = np.ones((4, 4), np.float32)
    tensors["model.vision_tower.norm.weight"] = np.ones(4, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(folder: Path) -> Array:
    made = DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=64)
    return made.logits(PROMPT)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0] or "plain")
@pytest.mark.parametrize(("base", "name"), [("llama", "Llava"), ("mistral", "Mistral3")])
def test_the_language_model_has_the_logits_that_it_has_alone(
    tmp_path: Path, base: str, name: str, names: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(build(TINY_MODELS[base], tmp_path / "alone"))
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": name.lower(),
        "text_config": TINY_MODELS[base].config,
        "vision_config": {"hidden_size": 4},
    }
    folder = wrapped(tmp_path / "wrapped", base, names, config)
    np.testing.assert_array_equal(logits(folder), expected)
    assert f"{name}ForConditionalGeneration: its language model is served, for text alone" in caplog.text


@pytest.mark.parametrize("flat", [True, False])
def test_rotary_embedding_of_images_is_the_usual_one_for_text(tmp_path: Path, flat: bool) -> None:
    expected = logits(build(TINY_MODELS["qwen2"], tmp_path / "alone"))
    text = {**TINY_MODELS["qwen2"].config, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    text.pop("architectures", None)
    whole = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 1}}
    config = (
        {**text, **whole, "model_type": "qwen2_5_vl"}
        if flat
        else {**whole, "model_type": "qwen2_5_vl", "text_config": {**text, "model_type": "qwen2_5_vl_text"}}
    )
    folder = wrapped(tmp_path / "wrapped", "qwen2", NAMES[3] if flat else NAMES[1], config)
    np.testing.assert_array_equal(logits(folder), expected)


@pytest.mark.parametrize("transposed", [True, False], ids=["published", "in memory"])
def test_experts_of_qwen3_vl_are_stored_together(tmp_path: Path, transposed: bool) -> None:
    """[E, hidden, 2 inner] and [E, inner, hidden]; its router divides by the sum, whatever the section says."""
    model = TINY_MODELS["qwen3moe"]
    expected = logits(build(model, tmp_path / "alone"))
    folder = wrapped(tmp_path / "wrapped", "qwen3moe", NAMES[1], seeing("Qwen3VLMoe", "qwen3_vl_moe", "qwen3moe"))
    tensors = {f"model.language_{name}": values for name, values in make_tensors(model).items()}
    tensors["lm_head.weight"] = tensors.pop("model.language_lm_head.weight")
    for layer in range(model.config["num_hidden_layers"]):
        at = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{at}{expert}.{part}_proj.weight") for expert in range(model.config["num_experts"])])
            for part in ("gate", "up", "down")
        )
        both = np.concatenate([gate, up], axis=1)
        tensors[at + "gate_up_proj"] = both.swapaxes(1, 2) if transposed else both
        tensors[at + "down_proj"] = down.swapaxes(1, 2) if transposed else down
    write_safetensors(folder / "model.safetensors", tensors)
    np.testing.assert_array_equal(logits(folder), expected)
    del tensors["model.language_model.layers.0.mlp.experts.down_proj"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=r"experts.down_proj"):
        logits(folder)


def test_glm_4_5v_has_the_experts_of_glm_4_5(tmp_path: Path) -> None:
    expected = logits(build(TINY_MODELS["glm4moe"], tmp_path / "alone"))
    config = seeing("Glm4vMoe", "glm4v_moe", "glm4moe")
    np.testing.assert_array_equal(logits(wrapped(tmp_path / "wrapped", "glm4moe", NAMES[1], config)), expected)


def seeing(name: str, kind: str, base: str) -> dict[str, Any]:
    """A mixture of experts inside, whose section leaves out what its class has by default."""
    section = {**TINY_MODELS[base].config, "model_type": f"{kind}_text", "rope_scaling": {"mrope_section": [2, 3, 3]}}
    for key in ("architectures", "norm_topk_prob", "attention_bias"):
        section.pop(key, None)
    return {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": section}


def test_an_unsupported_language_model_is_named(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": {"model_type": "gemma3n_text", "hidden_size": 64},
    }
    folder = wrapped(tmp_path, "llama", NAMES[0], config)
    with pytest.raises(ModelError, match='model_type "gemma3n_text" is none of theirs'):
        read_model_config(folder)


def test_what_speaks_alone_is_no_part(tmp_path: Path) -> None:
    assert not load_config(build(TINY_MODELS["llama"], tmp_path)).is_text_part
