"""Forms in which checkpoints store experts, and what config.json may say of mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import BLOCK_FORMATS
from tessera.engine.models.config import load_config, parse_config
from tessera.engine.models.specs import MoESpec
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import MoEWeights, Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.models.tiny_mixtures import NUM_EXPERTS, TINY_MIXTURES
from tests.support.models.tiny_models import TINY_MODELS, build, make_tensors, write_safetensors


def loaded(folder: Path, dtype: np.dtype[Any] = float32) -> Weights:
    return load_weights(folder, load_config(folder), dtype, make_ops(CPU))


def mixture(weights: Weights, layer: int) -> MoEWeights:
    found = weights.layers[layer].mlp
    assert isinstance(found, MoEWeights)
    return found


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral"])
def test_experts_may_be_stored_one_by_one_or_fused(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name]
    expected = loaded(build(model, tmp_path / "each"))
    tensors = make_tensors(model)
    parts = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for layer in range(2):
        at = f"model.layers.{layer}." + ("block_sparse_moe." if name == "mixtral" else "mlp.")
        each = [[tensors.pop(f"{at}experts.{expert}.{part}.weight") for part in parts] for expert in range(NUM_EXPERTS)]
        fused = f"model.layers.{layer}.mlp.experts."
        tensors[fused + "gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
        tensors[fused + "down_proj"] = np.stack([down for *_, down in each])
    folder = tmp_path / "fused"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    write_safetensors(folder / "model.safetensors", tensors)
    found = loaded(folder)
    for one, other in zip(expected.tensors(), found.tensors(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_mxfp4_experts_stay_in_their_blocks(tmp_path: Path) -> None:
    weights = loaded(build(TINY_MODELS["gptoss-mxfp4"], tmp_path))
    for weight in (mixture(weights, 0).up, mixture(weights, 0).down):
        assert [part.format for part in weight.parts] == [BLOCK_FORMATS["MXFP4"]]


def test_mxfp4_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = TINY_MODELS["gptoss-mxfp4"]
    folder = build(model, tmp_path)
    tensors = make_tensors(model)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    write_safetensors(folder / "model.safetensors", {**tensors, name: tensors[name][:, 1:]})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.experts\.down_proj_scales has shape"):
        loaded(folder)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen3moe"]
    folder = build(model, tmp_path)
    tensors = make_tensors(model)
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        loaded(folder)


def test_which_layers_are_mixtures() -> None:
    def mixtures(name: str) -> list[bool]:
        config = parse_config(TINY_MIXTURES[name], {})
        return [isinstance(layer.mlp, MoESpec) for layer in config.layers]

    assert mixtures("qwen2moe-sparse") == [False, True, False, False]
    assert mixtures("qwen3moe-dense") == [False, True]
    assert mixtures("glm4moe") == [False, True]
    assert mixtures("mixtral") == [True, True]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8"),
        ("mixtral", {"num_local_experts": 100000}, "num_local_experts must be an integer from 1 to 512"),
        ("glm4moe", {"n_group": 3}, "n_group must be 1, or a divisor of 8"),
        ("glm4moe-groups", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group must be groups with 3 experts"),
        ("gptoss", {"swiglu_limit": 5.0}, "swiglu_limit must be 7.0, not 5.0"),
        ("qwen3moe", {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layer numbers"),
        ("phimoe-longrope", {"rope_scaling": None, "router_jitter_noise": -1}, "router_jitter_noise must be a number"),
    ],
)
def test_what_is_wrong_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**TINY_MIXTURES[name], **changes}, {})
