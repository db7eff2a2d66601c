"""Configurations of quantised checkpoints, the modules that they name, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import Fp8Format, GroupFormat
from tessera.engine.models.config import load_config
from tessera.engine.models.quantised.fp8 import Fp8Scheme
from tessera.engine.models.quantised.groups import AwqScheme, GptqScheme, PackedScheme
from tessera.engine.models.quantised.methods import quantisation_of_config, read_quantisation
from tessera.engine.models.quantised.mlx import MlxScheme
from tessera.engine.models.quantised.rules import Quantisation
from tessera.engine.models.quantised.stored import ModuleTensors
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.cases import quantisers
from tests.support.cases.op_cases import Array, random_array
from tests.support.cases.quantisers import SCHEMES, Scheme, gptq_config, packed_config, quantised_model, write_tensors
from tests.support.models.tiny_models import TINY_MODELS

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "lm_head"


def read(section: dict[str, Any], key: str = "quantization_config") -> Quantisation:
    found = quantisation_of_config({key: section})
    assert found is not None
    return found


# -- modules --------------------------------------------------------------------------------------


def test_ignore_lists_of_compressed_tensors() -> None:
    section = {**packed_config(4, 128, symmetric=True), "ignore": [HEAD, "re:.*self_attn.*"]}
    found = read(section)
    assert [found.scheme_of(name) for name in (Q, HEAD)] == [None, None]
    assert found.scheme_of(DOWN) == PackedScheme(4, 128, symmetric=True)


def test_groups_of_modules_differ_in_their_schemes() -> None:
    """A pattern comes before a class."""
    first = packed_config(4, 32, symmetric=False)
    second = SCHEMES["fp8-channel"].config["config_groups"]["group_0"]
    groups = {
        **first["config_groups"],
        "group_1": {**second, "targets": ["re:.*down_proj$"], "format": "float-quantized"},
    }
    found = read({**first, "format": "mixed-precision", "config_groups": groups})
    assert found.scheme_of(Q) == PackedScheme(4, 32, symmetric=False)
    assert found.scheme_of(DOWN) == Fp8Scheme(None, "dynamic")


@pytest.mark.parametrize(
    ("listed", "left_out"),
    [
        (["lm_head"], {HEAD}),
        (["mlp.down_proj"], {DOWN}),
        (["model.layers.1"], set()),  # not of layer 11
        (["model.layers.11"], {DOWN}),
        (["self_attn"], {Q}),
        (None, set()),
    ],
)
def test_modules_to_not_convert(listed: list[str] | None, left_out: set[str]) -> None:
    for name in ("awq", "deepseek"):
        found = read({**SCHEMES[name].config, "modules_to_not_convert": listed})
        assert {module for module in (Q, DOWN, HEAD) if found.scheme_of(module) is None} == left_out


def test_modelopt_lists_have_wildcards(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.1*"]}})
    )
    found = read_quantisation(tmp_path, {})
    assert found is not None
    assert [found.scheme_of(name) for name in (Q, DOWN, HEAD)] == [Fp8Scheme(None, "static"), None, None]


def test_files_beside_config_json(tmp_path: Path) -> None:
    assert read_quantisation(tmp_path, {}) is None
    (tmp_path / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"})
    )
    found = read_quantisation(tmp_path, {})
    assert found is not None
    assert found.scheme_of(Q) == AwqScheme(64)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": -1, "desc_act": True}))
    found = read_quantisation(tmp_path, {})
    assert found is not None
    assert found.scheme_of(Q) == GptqScheme(8, None)


def test_modules_of_gptq_have_settings_of_their_own() -> None:
    found = read(
        {**gptq_config(4, 128), "dynamic": {r"-:.*down_proj": {}, r"+:.*q_proj": {"bits": 8, "group_size": 32}}}
    )
    assert found.scheme_of(DOWN) is None
    assert found.scheme_of(Q) == GptqScheme(8, 32)
    assert found.scheme_of(Q.replace("q_proj", "k_proj")) == GptqScheme(4, 128)


def test_modules_of_mlx_have_settings_of_their_own() -> None:
    found = read({"group_size": 64, "bits": 4, Q: {"group_size": 32, "bits": 8}, HEAD: False}, "quantization")
    assert [found.scheme_of(name) for name in (Q, DOWN, HEAD)] == [MlxScheme(8, 32), MlxScheme(4, 64), None]


def rotated(*locations: str) -> dict[str, Any]:
    """As llm-compressor's QuIPModifier and SpinQuantModifier save it."""
    places = [{"targets": ["Linear"], "location": location, "inverse": False, "ignore": []} for location in locations]
    groups = {"v": {"type": "hadamard", "apply": places, "randomize": True, "requires_grad": False}}
    return {**SCHEMES["w4a16"].config, "transform_config": {"config_groups": groups}}


def test_rotations_that_the_weights_have_in_them_need_nothing() -> None:
    for section in (rotated("weight_output", "weight_input"), {**SCHEMES["w4a16"].config, "transform_config": {}}):
        assert read(section).scheme_of(Q) == read(SCHEMES["w4a16"].config).scheme_of(Q)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (rotated("weight_input", "input"), 'a rotation of "input" while the model runs of compressed-tensors is not'),
        ({"quant_method": "exl2"}, 'quantisation by quant_method "exl2" is not supported; supported are FP8, '),
        ({"quant_method": "fbgemm_fp8"}, 'quant_method "fbgemm_fp8" is not supported'),
        ({"quant_method": "aqlm"}, 'quant_method "aqlm" is not supported'),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ of 3 bits"),
        ({**gptq_config(4, 128), "checkpoint_format": "marlin"}, 'GPTQ of format "marlin"'),
        ({**gptq_config(4, 1)}, "group_size must be an integer from 2"),
        ({**SCHEMES["awq"].config, "version": "gemv"}, 'AWQ of version "gemv"'),
        ({**SCHEMES["awq"].config, "bits": 3}, "AWQ of 3 bits"),
        ({**SCHEMES["awq"].config, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        ({**SCHEMES["nf4"].config, "bnb_4bit_quant_type": "fp4"}, 'bitsandbytes "fp4"'),
        ({**SCHEMES["nf4"].config, "load_in_8bit": True}, "bitsandbytes in 8 bits"),
        ({**SCHEMES["deepseek"].config, "fmt": "e5m2"}, 'fp8 of format "e5m2"'),
        ({**SCHEMES["deepseek"].config, "weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ({**SCHEMES["w4a16"].config, "format": "nvfp4-pack-quantized"}, 'the format "nvfp4-pack-quantized"'),
        ({**SCHEMES["w4a16"].config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "the sparsity"),
        ({**packed_config(4, 128, symmetric=True), "ignore": ["re:("]}, '"(" is not a regular expression'),
        (packed_config(2, 128, symmetric=True), 'int weights of 2 bits by "group"'),
        ({"quant_method": "compressed-tensors"}, "config_groups is empty"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        quantisation_of_config({"quantization_config": section}, "config.json")
    assert message in str(refused.value)
    assert str(refused.value).startswith("config.json: quantization_config")


# -- tensors --------------------------------------------------------------------------------------


class InMemory:
    def __init__(self, tensors: dict[str, Array]) -> None:
        self.stored = {f"m.{name}": array for name, array in tensors.items()}

    @property
    def names(self) -> set[str]:
        return set(self.stored)

    def path(self, name: str) -> Path:
        return Path("model.safetensors")

    def tensor(self, name: str) -> Array:
        return self.stored[name]


W: Array = random_array(7, (27, 200)).astype(np.float64)
ODD_SHAPES: dict[str, tuple[Any, Any]] = {
    "compressed": (PackedScheme(4, 32, symmetric=False), lambda: quantisers.compressed(W, 4, 32, symmetric=False)),
    "compressed-8": (PackedScheme(8, None, symmetric=False), lambda: quantisers.compressed(W, 8, -1, symmetric=False)),
    "gptq": (GptqScheme(4, 128), lambda: quantisers.gptq(W[:24, :], 4, 128, symmetric=False)),
    "gptq-8": (GptqScheme(8, 64), lambda: quantisers.gptq(W[:24, :], 8, 64, symmetric=True, acts=True)),
    "awq": (AwqScheme(64), lambda: quantisers.awq(W[:24, :], 64)),
    "fp8": (Fp8Scheme((16, 128), "dynamic"), lambda: quantisers.fp8(W, (16, 128))),
    "mlx": (MlxScheme(8, 32), lambda: quantisers.mlx(W, 8, 32)),
}


@pytest.mark.parametrize("name", ODD_SHAPES)
def test_odd_shapes_and_rows_from_anywhere(name: str) -> None:
    """The last group, block and word are cut off."""
    scheme, pack = ODD_SHAPES[name]
    tensors, numbers = pack()
    matrix = scheme.open(ModuleTensors(InMemory(tensors), "m"))
    assert matrix.shape == numbers.shape
    for rows in (slice(0, len(numbers)), slice(3, 21), slice(17, 18)):
        np.testing.assert_allclose(matrix[rows], numbers[rows], rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", {"scales": None}, "m lacks the tensor m.scales, which its quantisation calls for"),
        (
            "gptq",
            {"scales": np.ones((4, 24), np.float16)},
            "m.scales has shape [4, 24], but 24 x 200 integers in groups",
        ),
        ("gptq", {"qzeros": np.ones((2, 3), np.int64)}, "m.qzeros is int64; it must be int32 or uint32"),
        ("gptq", {"g_idx": np.full(200, 1, np.int32)}, "m.g_idx does not put 128 columns in each of 2 groups"),
        (
            "awq",
            {"qzeros": np.ones((4, 5), np.int32)},
            "m.qzeros has shape [4, 5], but 24 x 200 integers in groups of 64",
        ),
        (
            "compressed",
            {"weight_shape": np.array([27, 300])},
            "weight_shape is [27, 300], which the shape of weight_packed",
        ),
        ("compressed", {"weight_zero_point": None}, "lacks the tensor m.weight_zero_point"),
        ("fp8", {"weight_scale": np.ones(3, np.float32)}, "27 x 200 values in blocks of 16 x 128 make it [2, 2]"),
        ("mlx", {"biases": np.ones((27, 6), np.float32)}, "m.biases has shape [27, 6], but 27 x 200 integers"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, change: dict[str, Array | None], message: str) -> None:
    scheme, pack = ODD_SHAPES[name]
    tensors = {**pack()[0], **change}
    with pytest.raises(ModelError) as refused:
        scheme.open(ModuleTensors(InMemory({key: array for key, array in tensors.items() if array is not None}), "m"))
    assert message in str(refused.value)


def test_a_group_size_that_is_not_the_checkpoints_is_named(tmp_path: Path) -> None:
    wrong = Scheme(gptq_config(4, 64), SCHEMES["gptq"].pack)
    folder, _ = quantised_model(tmp_path, wrong)
    with pytest.raises(ModelError, match=r"has shape \[2, .*\], but .* integers in groups of 64 make it \[1, "):
        load_weights(folder, load_config(folder), float32, make_ops(CPU))


def test_a_module_that_is_said_to_be_plain_must_be(tmp_path: Path) -> None:
    config = {**SCHEMES["awq"].config, "modules_to_not_convert": ["down_proj"]}
    folder, _ = quantised_model(tmp_path, Scheme(config, SCHEMES["awq"].pack))
    with pytest.raises(
        ModelError, match=r"mlp\.down_proj\.qweight in a module that its configuration leaves in 16 bits"
    ):
        load_weights(folder, load_config(folder), float32, make_ops(CPU))


def test_parts_of_a_fused_matrix_differ(tmp_path: Path) -> None:
    """Plain and quantised, and rows that share blocks with no others."""
    folder, exact = quantised_model(tmp_path, SCHEMES["w4a16-asymmetric"], plain=("lm_head", "k_proj"))
    loaded, expected = (load_weights(path, load_config(path), float32, make_ops(CPU)) for path in (folder, exact))
    qkv = loaded.layers[0].attention.qkv
    assert [part.format.name for part in qkv.parts] == ["int_groups", "dense", "int_groups"]
    assert qkv.parts[0].format == GroupFormat(4, 32)
    assert loaded.lm_head is not None
    assert expected.lm_head is not None
    assert np.array_equal(
        loaded.lm_head.parts[0].tensors["values"].numpy(), expected.lm_head.parts[0].tensors["values"].numpy()
    )
    blocks = Scheme(
        {**SCHEMES["deepseek"].config, "weight_block_size": [24, 16]},
        lambda w: quantisers.fp8(w, (24, 16), name="weight_scale_inv"),
        rounds_input=True,
    )
    folder, _ = quantised_model(tmp_path / "blocks", blocks)
    weights = load_weights(folder, load_config(folder), float32, make_ops(CPU))
    assert [(part.format, part.shape[0]) for part in weights.layers[0].attention.qkv.parts] == [
        (Fp8Format((24, 16)), 64),
        (Fp8Format((24, 16)), 32),
        (Fp8Format((24, 16)), 32),
    ]


def test_a_tied_head_and_names_of_a_part_that_sees(tmp_path: Path) -> None:
    """Lists name modules as the checkpoint does."""
    config = TINY_MODELS["qwen2"].config
    scheme = Scheme(
        {**SCHEMES["awq"].config, "modules_to_not_convert": ["model.language_model.layers.0.mlp"]}, SCHEMES["awq"].pack
    )
    folder, _ = quantised_model(tmp_path, scheme, "qwen2", plain=("lm_head", "layers.0.mlp"))
    assert load_weights(folder, load_config(folder), float32, make_ops(CPU)).lm_head is not None
    found = read(scheme.config)
    assert found.scheme_of("model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj") is None
    assert config["tie_word_embeddings"]


def test_tensors_are_refused_before_any_is_read(tmp_path: Path) -> None:
    folder, _ = quantised_model(tmp_path, SCHEMES["fp8-channel"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "quark"}}))
    write_tensors(folder / "model.safetensors", {})
    with pytest.raises(ModelError, match='"quark" is not supported'):
        load_config(folder)
