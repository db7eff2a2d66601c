"""Models in GGUF against the same models in safetensors, plain and quantised, and against references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.formats import BLOCK_FORMATS, DenseFormat
from tessera.engine.gguf.blocks import dequantize
from tessera.engine.gguf.model import open_gguf
from tessera.engine.models.config import load_config
from tessera.engine.models.pooling import load_pooling
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import MoEWeights, Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.embedding_runner import EncoderRunner
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, float32
from tests.engine.gguf.converter import ARCHITECTURES, convert, plain, write_converted
from tests.engine.gguf.quantized import QUANTIZED, WIDE, Array, quantized
from tests.engine.gguf.writer import Stored
from tests.support.cases.gguf_blocks import random_blocks
from tests.support.decoder_harness import DecoderHarness, Row, relative_error, scattered_blocks, step_batch
from tests.support.models import tiny_encoder
from tests.support.models.tiny_families import FAMILIES, MAX_LEN, build_family
from tests.support.models.tiny_families import prompt as family_prompt
from tests.support.models.tiny_families import tensors as family_tensors
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build, make_tensors, prompt, write_safetensors

# What GGUF has no words for, or llama.cpp does not convert.
NOT_IN_GGUF = {
    *("llama-dynamic", "llama-yarn-mscale", "llama-gelu", "qwen2-window", "smollm3-window", "gpt2-variants"),
    *("ministral", "ministral-pattern", "exaone4"),
    *("mixtral-window", "qwen2moe-sparse", "qwen3moe-dense", "ernie4_5-moe-sparse", "gptoss-mxfp4", "dots1-window"),
    *("glm4moe-groups", "phimoe-longrope"),
}


def logits(path: Path, model: TinyModel) -> Array:
    made = DecoderHarness.of(path, make_ops(CPU), float32, max_model_len=model.max_model_len)
    return made.logits(prompt())


@pytest.mark.parametrize("name", sorted(TINY_MODELS.keys() - NOT_IN_GGUF))
def test_a_model_in_gguf_has_the_logits_of_its_safetensors(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name]
    expected = logits(build(model, tmp_path / "folder"), model)
    assert relative_error(logits(write_converted(tmp_path / "m.gguf", model), model), expected) < 1e-5


# Of families with another generation, form or prefix in GGUF: what it has no words for, or llama.cpp does not convert.
FAMILIES_NOT_IN_GGUF = {
    *("gemma2-uncapped", "gemma2", "gemma3-saved", "cohere2-types", "falcon-serial", "hunyuan-alpha"),
    *("gpt-bigcode-heads", "baichuan2", "phi-groups"),
}
FAMILIES_IN_GGUF = sorted(
    name
    for name, config in FAMILIES.items()
    if config["model_type"] in ARCHITECTURES and name not in FAMILIES_NOT_IN_GGUF
)


@pytest.mark.parametrize("name", FAMILIES_IN_GGUF)
def test_a_family_in_gguf_has_the_logits_of_its_safetensors(name: str, tmp_path: Path) -> None:
    def logits_of(path: Path) -> Array:
        return DecoderHarness.of(path, make_ops(CPU), float32, max_model_len=MAX_LEN).logits(family_prompt())

    path = convert(tmp_path / "m.gguf", FAMILIES[name], family_tensors(name))
    assert relative_error(logits_of(path), logits_of(build_family(name, tmp_path / "folder"))) < 1e-5


def test_glm4_that_sees_has_its_queries_and_keys_in_halves(tmp_path: Path) -> None:
    """llama.cpp, conversion/glm.py: normal_to_neox, where the model has a RoPE of images (GLM-4.1V)."""

    def logits_of(path: Path) -> Array:
        return DecoderHarness.of(path, make_ops(CPU), float32, max_model_len=MAX_LEN).logits(family_prompt())

    config, stored = FAMILIES["glm4"], family_tensors("glm4")
    head_dim, rotary_dim = config["head_dim"], config["head_dim"] // 2
    halves = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    for name in [name for name in stored if ".q_proj." in name or ".k_proj." in name]:
        heads = stored[name].reshape(-1, head_dim, *stored[name].shape[1:])
        stored[name] = heads[:, halves].reshape(stored[name].shape)
    metadata = {"glm4.rope.dimension_sections": np.array([2, 1, 1, 0], np.int32)}
    path = convert(tmp_path / "m.gguf", config, stored, metadata=metadata)
    assert relative_error(logits_of(path), logits_of(build_family("glm4", tmp_path / "folder"))) < 1e-5


def encoder_file(path: Path, **keys: Any) -> Path:
    tensors = {name: values for name, values in tiny_encoder.tensors().items() if not name.startswith("pooler")}
    return convert(path, tiny_encoder.CONFIG, tensors, metadata=keys)


def test_an_encoder_in_gguf_has_the_embeddings_of_its_safetensors(tmp_path: Path) -> None:
    def embeddings(model: Path) -> Array:
        config = EngineConfig(model=str(model), dtype="float32").with_device_defaults("cpu")
        runner = EncoderRunner(config, load_config(model), model, CPU, make_ops(CPU), pooling="cls")
        return runner.compute(tiny_encoder.inputs())

    expected = embeddings(tiny_encoder.build_encoder(tmp_path / "folder"))
    assert relative_error(embeddings(encoder_file(tmp_path / "m.gguf")), expected) < 1e-5


@pytest.mark.parametrize(("number", "expected"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_metadata_say_how_embeddings_are_pooled(tmp_path: Path, number: int | None, expected: str) -> None:
    path = encoder_file(tmp_path / "m.gguf", **({} if number is None else {"bert.pooling_type": number}))
    assert load_pooling(path, "auto", "mean").kind == expected
    assert load_pooling(path, "last", "mean").kind == "last"


# -- quantised ------------------------------------------------------------------------------------

TYPE_NUMBERS = {kind.name: kind for kind in gguf.GGMLQuantizationType}


def weights_of(path: Path) -> Weights:
    return load_weights(path, load_config(path), float32, make_ops(CPU))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantised_weights_have_the_logits_of_the_numbers_they_stand_for(name: str, tmp_path: Path) -> None:
    path, folder = quantized(tmp_path, name)
    assert relative_error(logits(path, WIDE), logits(folder, WIDE)) < 2e-5
    formats = {part.format for weight in weights_of(path).linear_weights() for part in weight.parts}
    assert formats == {BLOCK_FORMATS[name]}


def test_the_rows_of_a_fused_matrix_may_differ_in_type(tmp_path: Path) -> None:
    types = ("Q4_K", "Q6_K", "Q8_0", "F32", "Q4_K", "MXFP4", "IQ4_XS")
    path, folder = quantized(tmp_path, *types)
    assert relative_error(logits(path, WIDE), logits(folder, WIDE)) < 2e-5
    weights = weights_of(path)
    several = [len(weight.parts) for layer in weights.layers for weight in (layer.attention.qkv, layer.mlp.up)]
    assert max(several) == 3
    assert DenseFormat(float32) in {part.format for weight in weights.linear_weights() for part in weight.parts}


WIDE_MIXTURE = TinyModel(
    "qwen3moe-wide", {**TINY_MODELS["qwen3moe"].config, "hidden_size": 256, "moe_intermediate_size": 256}
)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("MXFP4",) * 3, ("Q4_K", "Q5_K", "Q8_0")], ids="-".join)
def test_quantised_experts_have_the_logits_of_the_numbers_they_stand_for(
    types: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(7)
    exact: dict[str, Array] = {}

    def store(name: str, values: Array) -> Stored:
        if "_exps" not in name:
            return plain(name, values)
        chosen = dict(zip(("gate", "up", "down"), types, strict=True))[name.split("_")[1]]
        stored = random_blocks(chosen, values.size, rng).reshape(values.shape[0] * values.shape[1], -1)
        exact[name] = dequantize(stored, BLOCK_FORMATS[chosen].type).reshape(values.shape)
        return Stored(chosen, values.shape, stored.tobytes())

    tensors = make_tensors(WIDE_MIXTURE)
    path = convert(tmp_path / "m.gguf", WIDE_MIXTURE.config, tensors, store=store)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE_MIXTURE.config))
    plain_tensors = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(2):
        of = {part: exact[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")}
        at = f"model.layers.{layer}.mlp.experts."
        plain_tensors[at + "gate_up_proj"] = np.concatenate([of["gate"], of["up"]], axis=1)
        plain_tensors[at + "down_proj"] = of["down"]
    write_safetensors(folder / "model.safetensors", plain_tensors)
    assert relative_error(logits(path, WIDE_MIXTURE), logits(folder, WIDE_MIXTURE)) < 2e-5
    same = types[0] == types[1]
    caplog.clear()
    calls: list[tuple[int, int]] = []
    weights = load_weights(path, load_config(path), float32, make_ops(CPU), lambda *done: calls.append(done))
    mixture = weights.layers[0].mlp
    assert isinstance(mixture, MoEWeights)
    formats = [mixture.up.parts[0].format, mixture.down.parts[0].format]
    assert formats == [BLOCK_FORMATS[types[0]] if same else DenseFormat(float32), BLOCK_FORMATS[types[2]]]
    assert calls[-1][0] == calls[-1][1] == weights.nbytes
    assert ("gate and up of the experts of 2 layers are stored in two types" in caplog.text) == (not same)


def test_blocks_stay_in_memory_as_they_are_stored(tmp_path: Path) -> None:
    path, _ = quantized(tmp_path, "Q4_K", "Q6_K", "Q6_K")
    stored = sum(info.nbytes for info in open_gguf(path).tensors.values())
    assert weights_of(path).nbytes == stored
    calls: list[tuple[int, int]] = []
    load_weights(path, load_config(path), float32, make_ops(CPU), lambda *done: calls.append(done))
    assert calls[-1] == (stored, stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            "lacks the tensor model.norm.weight, which the metadata calls",
        ),
        (
            lambda tensors: tensors.update({"x.weight": np.ones(3)}),
            "the tensor None.weight, which the metadata has no place for",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": np.ones(3)}),
            "has shape [3], but the metadata makes it [64]",
        ),
    ],
)
def test_fault_gguf_tensors_that_make_no_model_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    model = TINY_MODELS["llama"]
    tensors = make_tensors(model)
    change(tensors)
    path = convert(tmp_path / "m.gguf", model.config, tensors)
    with pytest.raises(ModelError) as refused:
        weights_of(path)
    assert message in str(refused.value)


# -- a trained model ------------------------------------------------------------------------------


@pytest.mark.shared
def test_stories260k_in_gguf_gives_every_greedy_token_of_the_reference(shared_models: Path) -> None:
    folder = shared_models / "stories260K"
    path = folder / "stories260K.gguf"
    config = EngineConfig(model=str(path), block_size=16, max_num_seqs=4, max_num_batched_tokens=256)
    runner = ModelRunner(config, load_config(path), CPU, make_ops(CPU))
    greedy = SamplingParams(max_tokens=120, temperature=0.0)
    for slot, case in enumerate(json.loads((folder / "greedy_ref.json").read_text())["cases"]):
        row = Row(slot=slot, blocks=scattered_blocks(16, first=16 * slot), prompt=case["prompt_ids"], params=greedy)
        for _ in range(120):
            row.output.extend(runner.execute(step_batch([row], 16)).token_ids.tolist())
        assert row.output == case["greedy_ids"]
