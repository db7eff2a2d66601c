"""Model folders in the forms that people have them: each is served, or refused in a sentence that names it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ModelError
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tessera.engine.models.config import load_config, parse_config
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import resolve_max_model_len
from tessera.engine.tensor import CPU, float32
from tests.support.models.tiny_encoder import build_encoder
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build, make_tensors, write_safetensors

Array = np.ndarray[Any, Any]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(folder: Path) -> Weights:
    return load_weights(folder, load_config(folder), float32, make_ops(CPU))


def made(folder: Path, base: str, tensors: dict[str, Array] | None = None, **config: Any) -> Path:
    """A tiny model with other config keys and tensors."""
    model = TINY_MODELS[base]
    build(dataclasses.replace(model, config={**model.config, **config}), folder)
    if tensors is not None:
        write_safetensors(folder / "model.safetensors", tensors)
    return folder


def engine(folder: Path) -> LoadedEngine:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    return load_engine(config, lambda stage, done, total: None)


def dense(weights: Weights) -> tuple[Array, Array]:
    """Embedding and head."""
    assert weights.lm_head is not None
    assert weights.embedding.dense is not None
    assert weights.lm_head.dense is not None
    return weights.embedding.dense.numpy(), weights.lm_head.dense.numpy()


# -- heads ----------------------------------------------------------------------------------------


def test_a_tied_model_may_store_only_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = make_tensors(TINY_MODELS["qwen2"])
    table = tensors.pop(EMBEDDING)
    weights = load(made(tmp_path, "qwen2", {**tensors, HEAD: table}))
    assert weights.lm_head is weights.embedding
    assert np.array_equal(dense(weights)[0], table)
    assert not caplog.records


def test_a_stored_head_that_differs_is_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = make_tensors(TINY_MODELS["qwen2"])
    same = load(made(tmp_path / "same", "qwen2", {**tensors, HEAD: tensors[EMBEDDING]}))
    assert same.lm_head is same.embedding
    assert not caplog.records
    embedding, head = dense(load(made(tmp_path / "other", "qwen2", {**tensors, HEAD: 2 * tensors[EMBEDDING]})))
    assert np.array_equal(head, 2 * embedding)
    assert "lm_head.weight differs from model.embed_tokens.weight: the stored head is used" in caplog.text


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["LlamaModel"], None])
def test_an_untied_decoder_without_head_serves_embeddings(tmp_path: Path, architectures: Any) -> None:
    tensors = make_tensors(TINY_MODELS["llama"])
    whole = engine(made(tmp_path / "whole", "llama"))
    del tensors[HEAD]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    loaded = engine(made(tmp_path / "bare", "llama", bare, architectures=architectures))
    assert whole.info.generates
    assert not loaded.info.generates
    assert [info.pooling for info in loaded.info.embeddings] == ["last"]
    assert loaded.info.num_kv_blocks == 64 // loaded.info.block_size, "of one sequence: embeddings need none"
    assert loaded.info.num_parameters == whole.info.num_parameters - 128 * 64


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "starcoder2", "smollm3"])
def test_model_type_decides_where_no_class_is_named(base: str) -> None:
    config = TINY_MODELS[base].config
    expected = parse_config(config, {})
    (name,) = config["architectures"]
    for listed in (None, [], *([other] for other in ARCHITECTURES[name].base_classes)):
        assert parse_config({**config, "architectures": listed}, {}) == expected
    assert parse_config({key: value for key, value in config.items() if key != "architectures"}, {}) == expected


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_bert_with_another_head_is_an_encoder(tmp_path: Path, name: str) -> None:
    folder = build_encoder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    assert load_config(folder).is_encoder


def test_gamma_and_beta_are_weight_and_bias(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_encoder(tmp_path)
    expected = [tensor.numpy() for tensor in load(folder).tensors()]
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = re.sub(
        rb"(LayerNorm)\.(weight|bias)",
        lambda m: m[1] + {b"weight": b".gamma", b"bias": b".beta"}[m[2]],
        raw[8 : 8 + size],
    )
    assert b"gamma" in header
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(load(folder).tensors(), expected, strict=True))
    assert not caplog.records


def test_stale_entries_of_an_index_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = dataclasses.replace(TINY_MODELS["llama"], num_shards=2)
    index = build(model, tmp_path) / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.layers.9.old"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(found))
    load(tmp_path)
    assert 'names 1 tensors that its files lack, "model.layers.9.old" among them' in caplog.text
    found["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(found))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.norm\.weight"):
        load(tmp_path)


# -- values ---------------------------------------------------------------------------------------


def test_mistral_has_a_window_unless_it_says_none() -> None:
    def window(base: str, **changes: Any) -> int | None:
        values = {key: value for key, value in TINY_MODELS[base].config.items() if key != "sliding_window"}
        return parse_config({**values, **changes}, {}).layers[0].attention.sliding_window

    assert window("mistral") == window("ministral") == window("exaone4") == 4096
    assert window("mistral", sliding_window=None) is None
    assert window("qwen2") is None


def test_yarn_extends_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = parse_config({**TINY_MODELS["llama"].config, "rope_scaling": scaling}, {})
    assert resolve_max_model_len(EngineConfig(model="m"), config) == 128
    linear = parse_config({**TINY_MODELS["llama"].config, "rope_scaling": {"type": "linear", "factor": 4.0}}, {})
    assert resolve_max_model_len(EngineConfig(model="m"), linear) == 64


def test_what_is_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TINY_MODELS["llama"].config
    text = json.dumps(config)[:-1] + f', "vocab_size": {config["vocab_size"]}}}'
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>", "top_k": -5}')
    assert load_config(tmp_path) == parse_config(config, {})
    assert 'config.json has "vocab_size" twice: the last one counts' in caplog.text
    assert 'generation_config.json: eos_token_id "</s>" is left out' in caplog.text


# -- what cannot be served ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "file", "message"),
    [
        ({}, {"quantize_config.json": {"bits": 3}}, "quantize_config.json: quantisation by GPTQ of 3 bits is not"),
        (
            {},
            {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}},
            'hf_quant_config.json: quantization: quantisation by ModelOpt "NVFP4" is not supported; ',
        ),
        ({"quantization": {"group_size": 64, "bits": 2}}, {}, "quantization: quantisation by MLX of 2 bits is not"),
        ({"quantization_config": {"quant_method": "hqq"}}, {}, 'quantisation by quant_method "hqq" is not supported'),
    ],
)
def test_quantised_folders_are_named(tmp_path: Path, config: Any, file: dict[str, Any], message: str) -> None:
    folder = made(tmp_path, "llama", **config)
    for name, content in file.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ModelError) as refused:
        load_config(folder)
    assert message in str(refused.value)
    assert str(refused.value).endswith(": use one of those, an unquantised model or a GGUF")


def test_quantised_tensors_without_a_word_in_the_files_are_named(tmp_path: Path) -> None:
    tensors = make_tensors(TINY_MODELS["llama"])
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight")
    with pytest.raises(ModelError, match=r"\(it has the tensor model\.layers\.0\.mlp\.up_proj\.qweight\), but neither"):
        load(made(tmp_path, "llama", tensors))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_git_lfs_pointer_is_named(tmp_path: Path, name: str) -> None:
    folder = build(TinyModel("llama", TINY_MODELS["llama"].config), tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n")
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`"):
        load(folder)


def test_an_adapter_beside_a_config_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is a LoRA adapter, not a model: serve its base model with --lora"):
        load(folder)
