"""Plain checkpoints that are quantised while they load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig, LoadFormat, QuantizationName
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.formats import DenseFormat, Fp8Format, GroupFormat
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tessera.engine.models.config import load_config
from tessera.engine.models.quantised.rounded import RoundingName
from tessera.engine.models.weights import quantised_source
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.rounding import rounded_while_loading
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.cases.op_cases import Array, random_array
from tests.support.cases.quantisers import SCHEMES, quantised_model
from tests.support.models.tiny_models import TINY_MODELS, build, make_tensors, write_safetensors

NAMES: tuple[RoundingName, ...] = ("fp8", "int4")


def rounded(folder: Path, name: RoundingName) -> Weights:
    config = rounded_while_loading(load_config(folder), name, folder)
    return load_weights(folder, config, float32, make_ops(CPU))


def numbers(weights: Weights) -> list[Array]:
    return [
        np.concatenate(
            [
                part.format.dequantize({name: tensor.numpy() for name, tensor in part.tensors.items()}, slice(None))
                for part in weight.parts
            ]
        )
        for weight in weights.linear_weights()
    ]


@pytest.mark.parametrize("base", ["llama", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("name", NAMES)
def test_projections_are_rounded_to_nearest(
    name: RoundingName, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within half a step of e4m3 or of a group of 128; GPT-2's matrices are stored transposed, phi3's fused."""
    monkeypatch.setattr(quantised_source, "CHUNK_BYTES", 500)
    folder = build(TINY_MODELS[base], tmp_path)
    made, config = rounded(folder, name), load_config(folder)
    plain = load_weights(folder, config, float32, make_ops(CPU))
    for weight, found, expected in zip(made.linear_weights(), numbers(made), numbers(plain), strict=True):
        if weight.dense is not None:
            np.testing.assert_array_equal(found, expected)
            continue
        if name == "fp8":
            bound = np.abs(expected) * 2.0**-4 + np.abs(expected).max(axis=1, keepdims=True) / 448 * 2.0**-10
        else:
            bound = (np.maximum(expected.max(axis=1), 0) - np.minimum(expected.min(axis=1), 0))[:, None] / 15 * 0.51
        assert (np.abs(found - expected) <= bound * (1 + 1e-5)).all()
    for layer in made.layers:
        formats = {part.format for weight in (layer.attention.qkv, layer.mlp.down) for part in weight.parts}
        assert formats == ({Fp8Format()} if name == "fp8" else {GroupFormat(4, 128)})
    assert isinstance(made.embedding.parts[0].format, DenseFormat)
    assert made.nbytes < plain.nbytes * 0.75


def test_groups_of_integers_have_their_zero_and_their_ends() -> None:
    format = GroupFormat(4, 32)
    values = np.abs(random_array(1, (4, 80))) + np.float32(0.1)
    values[1, :32] = 0
    arrays = format.quantize(values)
    found = format.dequantize(arrays, slice(None))
    assert not found[1, :32].any()
    for start in (0, 32, 64):
        piece = slice(start, start + 32)
        np.testing.assert_allclose(found[2:, piece].max(axis=1), values[2:, piece].max(axis=1), rtol=1e-4)


def engine(folder: Path, quantization: QuantizationName, load_format: LoadFormat = "auto") -> LoadedEngine:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", quantization=quantization, load_format=load_format
    )
    return load_engine(config, lambda stage, done, total: None)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_start_names_format_and_bytes(load_format: LoadFormat, tmp_path: Path) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path)
    names: tuple[QuantizationName, ...] = ("none", "fp8", "int4")
    plain, fp8, int4 = (engine(folder, name, load_format).info for name in names)
    assert not plain.stored_bytes
    assert list(fp8.stored_bytes) == ["FP8", "float32"]
    assert set(int4.stored_bytes) == {"INT4", "float32"}
    assert int4.weight_bytes < fp8.weight_bytes < plain.weight_bytes
    assert plain.num_parameters == fp8.num_parameters == int4.num_parameters


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    folder, _ = quantised_model(tmp_path, SCHEMES["awq"])
    with pytest.raises(ConfigError, match=r"--quantization int4 is for checkpoints in 16 or 32 bits, but .* \(AWQ\)"):
        engine(folder, "int4")
    assert list(engine(folder, "none").info.stored_bytes) == ["float32", "INT4"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_finite_are_named(name: RoundingName, tmp_path: Path) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path)
    tensors = make_tensors(TINY_MODELS["llama"])
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are not finite"):
        rounded(folder, name)
