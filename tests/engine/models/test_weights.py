"""Checkpoints: what is loaded is what is stored, and a wrong or hostile folder is one clear error."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import LinearWeight
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.build import num_weight_bytes
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.safetensors import Checkpoint, SafetensorsFile
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, bfloat16, float16, float32
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build, make_tensors, write_safetensors

Array = np.ndarray[Any, Any]
OPS = make_ops(CPU)


def load(folder: Path, dtype: np.dtype[Any] = float32) -> Weights:
    return load_weights(folder, load_config(folder), dtype, OPS)


def numbers(weight: LinearWeight | None) -> Array:
    """Of a dense weight."""
    assert weight is not None
    assert weight.dense is not None
    return weight.dense.numpy()


def rewrite(folder: Path, tensors: dict[str, Array]) -> Path:
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return build(TINY_MODELS["llama"], tmp_path / "llama")


@pytest.fixture
def stored() -> dict[str, Array]:
    return make_tensors(TINY_MODELS["llama"])


# -- what is loaded -------------------------------------------------------------------------------


def test_parts_are_fused_in_order(llama: Path, stored: dict[str, Array]) -> None:
    weights = load(llama)
    layer = "model.layers.1."
    qkv = np.concatenate([stored[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    up = np.concatenate([stored[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert np.array_equal(numbers(weights.layers[1].attention.qkv), qkv)
    assert np.array_equal(numbers(weights.layers[1].mlp.up), up)
    norm = weights.layers[1].mlp.norms.before
    assert norm is not None
    assert np.array_equal(norm.weight.numpy(), stored[f"{layer}post_attention_layernorm.weight"])
    assert np.array_equal(numbers(weights.embedding), stored["model.embed_tokens.weight"])
    assert np.array_equal(numbers(weights.lm_head), stored["lm_head.weight"])


def test_gpt2_projections_are_turned(tmp_path: Path) -> None:
    model = TINY_MODELS["gpt2"]
    weights = load(build(model, tmp_path))
    tensors = make_tensors(model)
    assert np.array_equal(numbers(weights.layers[0].attention.qkv), tensors["h.0.attn.c_attn.weight"].T)
    assert np.array_equal(numbers(weights.layers[2].mlp.down), tensors["h.2.mlp.c_proj.weight"].T)
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "qwen3", "gpt2-variants"])
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=str)
def test_sizes_add_up(name: str, dtype: np.dtype[Any], tmp_path: Path) -> None:
    folder = build(TINY_MODELS[name], tmp_path)
    weights = load(folder, dtype)
    count = sum(tensor.size for tensor in make_tensors(TINY_MODELS[name]).values())
    assert weights.num_parameters == count
    assert weights.nbytes == count * dtype.itemsize == num_weight_bytes(load_config(folder), dtype)
    assert all(tensor.dtype == dtype for tensor in weights.tensors())


def test_sixteen_bit_storage_loses_nothing(tmp_path: Path) -> None:
    """The values are exact in bfloat16, so every storage and every dtype gives the same numbers."""
    model = TINY_MODELS["llama"]
    expected = numbers(load(build(model, tmp_path / "a")).layers[0].attention.qkv)
    stored = dataclasses.replace(model, storage="BF16", num_shards=4)
    folder = build(stored, tmp_path / "b")
    assert np.array_equal(numbers(load(folder).layers[0].attention.qkv), expected)
    assert np.array_equal(numbers(load(folder, bfloat16).layers[0].attention.qkv).astype(np.float32), expected)


def test_progress_ends_at_the_total(llama: Path) -> None:
    config = load_config(llama)
    calls: list[tuple[int, int]] = []
    load_weights(llama, config, bfloat16, OPS, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (num_weight_bytes(config, bfloat16),) * 2
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_large_tensors_go_in_pieces(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(llama, bfloat16)
    monkeypatch.setattr("tessera.engine.models.weights.checkpoint_source.CHUNK_BYTES", 1000)
    for one, other in zip(whole.tensors(), load(llama, bfloat16).tensors(), strict=True):
        assert np.array_equal(one.numpy(), other.numpy())


def test_harmless_extras_are_ignored(
    llama: Path, stored: dict[str, Array], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(rewrite(llama, {**stored, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8)}))
    gpt2 = TINY_MODELS["gpt2"]
    masks = {"h.0.attn.bias": np.ones((1, 1, 64, 64)), "h.0.attn.masked_bias": np.ones(())}
    load(rewrite(build(gpt2, tmp_path / "gpt2"), {**make_tensors(gpt2), **masks}))
    assert not caplog.records


# -- dummy weights --------------------------------------------------------------------------------


def test_dummy_weights_are_random_deterministic_and_shaped_like_real_ones(llama: Path) -> None:
    config = load_config(llama)
    one, same, other = (dummy_weights(config, bfloat16, OPS, seed=seed) for seed in (1, 1, 2))
    real = load(llama, bfloat16)
    assert [tensor.shape for tensor in one.tensors()] == [tensor.shape for tensor in real.tensors()]
    for first, second in zip(one.tensors(), same.tensors(), strict=True):
        assert np.array_equal(first.numpy(), second.numpy())
    assert not np.array_equal(numbers(one.layers[0].attention.qkv), numbers(other.layers[0].attention.qkv))
    assert not np.array_equal(numbers(one.layers[0].attention.out), numbers(one.layers[1].attention.out))
    assert numbers(one.embedding).astype(np.float32).std() == pytest.approx(0.02, rel=0.05)
    assert one.final_norm is not None
    assert (one.final_norm.weight.numpy() == 1).all()


def test_dummy_biases_are_zero(tmp_path: Path) -> None:
    weights = dummy_weights(load_config(build(TINY_MODELS["gpt2"], tmp_path)), float32, OPS)
    bias = weights.layers[0].attention.qkv.bias
    assert bias is not None
    assert not bias.numpy().any()
    assert numbers(weights.position_embedding).any()


# -- tensors that do not fit the config -----------------------------------------------------------


def test_missing_tensors_are_named(llama: Path, stored: dict[str, Array]) -> None:
    del stored["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        load(rewrite(llama, stored))


def test_many_missing_tensors_are_counted(llama: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks the tensors .* and \d+ more"):
        load(rewrite(llama, {"lm_head.weight": np.zeros((128, 64))}))


def test_unexpected_tensors_are_left_out_and_named(
    llama: Path, stored: dict[str, Array], caplog: pytest.LogCaptureFixture
) -> None:
    """Scales of a KV cache, layers that were pruned, a bias that config.json does not announce."""
    extras = {
        "model.layers.0.self_attn.q_proj.bias": np.ones(64),
        "model.layers.0.self_attn.k_scale": np.ones(1),
        "model.layers.3.mlp.up_proj.weight": np.ones((96, 64)),
    }
    whole = load(llama)
    found = load(rewrite(llama, {**stored, **extras}))
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(found.tensors(), whole.tensors(), strict=True))
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in extras)
    assert record.getMessage().endswith("which config.json has no place for: left out")


def test_a_wrong_shape_is_named(llama: Path, stored: dict[str, Array]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \[64, 32\], but config\.json makes it \[32, 64\]"):
        load(rewrite(llama, {**stored, name: stored[name].T.copy()}))


def test_integers_are_no_weights(llama: Path, stored: dict[str, Array]) -> None:
    text = json.dumps({"a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file = llama / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert SafetensorsFile(file).tensor("a").dtype == np.int32
    path = llama / "model.safetensors"
    raw = path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "I32"')
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="is int32; weights must be"):
        load(llama)


def test_values_beyond_float16_are_refused_not_infinite(llama: Path, stored: dict[str, Array]) -> None:
    stored["model.norm.weight"] = np.full(64, 1e6, np.float32)
    folder = rewrite(llama, stored)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has values beyond float16"):
        load(folder, float16)
    norm = load(folder, bfloat16).final_norm
    assert norm is not None
    assert (norm.weight.numpy().astype(np.float32) > 9e5).all()


# -- malformed and hostile files ------------------------------------------------------------------


def raw_file(path: Path, header: Any, data: bytes = b"", header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if header_bytes is None else header_bytes
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    as_list = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": as_list, "data_offsets": list(offsets) if isinstance(offsets, tuple) else offsets}


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    data = np.arange(5, dtype=np.float32)
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry((2, 1)),
        "b": entry((3,), (8, 20)),
        "c": entry((0,), (20, 20)),
    }
    file = SafetensorsFile(raw_file(tmp_path / "m.safetensors", header, data.tobytes()))
    assert file.names == {"a", "b", "c"}
    assert file.tensor("a").tolist() == [[0], [1]]
    assert file.tensor("b").tolist() == [2, 3, 4]
    assert file.tensor("c").shape == (0,)
    assert not file.tensor("b").flags.writeable
    assert not file.tensor("b").flags.owndata


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry((2,), (4, 12))}, "ends at byte"),
        ({"a": entry((2,), (2**62, 2**62 + 8))}, "ends at byte"),
        ({"a": entry((2,), (8, 0))}, "do not ascend"),
        ({"a": entry((2,), (-8, 0))}, "do not ascend"),
        ({"a": entry((3,), (0, 8))}, "does not fill its 8 bytes"),
        ({"a": entry((1,), (0, 8))}, "does not fill its 8 bytes"),
        ({"a": entry((2**32, 2**32), (0, 8))}, "does not fill its 8 bytes"),
        ({"a": entry((-2,), (0, 8))}, "must be at most 8 whole numbers"),
        ({"a": entry((-1, -2), (0, 8))}, "must be at most 8 whole numbers"),
        ({"a": entry([math.nan], (0, 8))}, "must be at most 8 whole numbers"),
        ({"a": entry([2.0], (0, 8))}, "must be at most 8 whole numbers"),
        ({"a": entry([True, 2], (0, 8))}, "must be at most 8 whole numbers"),
        ({"a": entry((1,) * 9, (0, 4))}, "must be at most 8 whole numbers"),
        ({"a": entry("2", (0, 8))}, "must be at most 8 whole numbers"),
        ({"a": entry((2,), (0, 8, 16))}, "two whole numbers"),
        ({"a": entry((2,), (0.0, 8.0))}, "two whole numbers"),
        ({"a": entry((2,), None)}, "two whole numbers"),
        ({"a": entry((2,), (0, 8), "F31")}, 'dtype "F31"'),
        ({"a": entry((2,), (0, 8), ["F32"])}, "dtype"),
        ({"a": [1, 2]}, "described by an object"),
        ({"a": entry(), "b": entry((1,), (4, 8))}, '"a" and "b" overlap'),
        ({"a": entry(), "b": entry()}, '"a" and "b" overlap'),
        (b"[]", "JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": ' * 100_000, "nested too deeply"),  # Python 3.13 reads 5,000
    ],
    ids=lambda value: str(value)[:60],
)
def test_fault_model_folder_a_lying_header_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", header, bytes(8))
    with pytest.raises(ModelError) as error:
        SafetensorsFile(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\x10\0\0", "too short"),
        (b"\xff" * 8 + b"{}", "more than the 104857600 accepted"),
        ((50 * 2**20).to_bytes(8, "little") + b"{}", "is truncated"),
    ],
    ids=["empty", "short", "huge header", "long header"],
)
def test_a_file_that_cannot_hold_its_header_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        SafetensorsFile(path)
    assert message in str(error.value)


def test_a_truncated_file_names_the_tensor(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .* it is truncated or malformed"):
        load(llama)


def sharded(tmp_path: Path, weight_map: Any) -> Path:
    folder = build(TINY_MODELS["llama"], tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "file_name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "..",
        "x\\y.safetensors",
        "model.bin",
        "",
        5,
        None,
    ],
    ids=str,
)
def test_an_index_cannot_lead_out_of_the_folder(file_name: Any, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "secret.safetensors", {"a": np.zeros(2)})
    with pytest.raises(ModelError, match="files of the same folder are read"):
        Checkpoint(sharded(tmp_path, {"a": file_name}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "names no files"),
        ([], "weight_map must be an object"),
        ({"a": "other.safetensors"}, "lacks other.safetensors"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_its_files_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        Checkpoint(sharded(tmp_path, weight_map))
    assert message in str(error.value)


def test_links_into_a_hub_cache_are_followed(tmp_path: Path) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path / "snapshot")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "0123abcd")
    (folder / "model.safetensors").symlink_to(blobs / "0123abcd")
    assert load(folder).num_parameters > 0


def test_fault_model_folder_pickled_weights_are_refused_with_the_reason(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only, a pickle, .* only safetensors are read"):
        load(llama)


def test_a_folder_without_weights_says_what_it_looked_for(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "consolidated.safetensors")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .* \(there is consolidated\.safetensors\)"):
        load(llama)


def test_fault_model_folder_code_is_never_run(tmp_path: Path) -> None:
    """auto_map names a canary; loading opens no Python file and imports nothing."""
    canary = "import pathlib\npathlib.Path(__file__).with_name('sprung').touch()\n"
    auto_map = {"AutoConfig": "canary.CanaryConfig", "AutoModelForCausalLM": "canary.Canary"}
    llama = TINY_MODELS["llama"]
    model = TinyModel("canary", {**llama.config, "auto_map": auto_map}, extra_files={"canary.py": canary})
    folder = build(model, tmp_path)
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "import", "exec", "compile"):
            opened.append(f"{event} {arguments[0]}")

    sys.addaudithook(watch)
    load(folder)
    watching = False
    assert any("model.safetensors" in event for event in opened), "the hook saw the load"
    assert not [event for event in opened if "canary" in event and event.endswith(".py")]
    assert not [event for event in opened if event.startswith(("import canary", "exec", "compile"))]
    assert not (folder / "sprung").exists()


def test_loading_takes_no_second_copy_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = TINY_MODELS["llama"]
    model = TinyModel("wide", {**llama.config, "intermediate_size": 8192}, storage="BF16")
    folder = build(model, tmp_path)
    monkeypatch.setattr("tessera.engine.models.weights.checkpoint_source.CHUNK_BYTES", 2**18)
    tracemalloc.start()
    weights = load(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert weights.nbytes > 16 * 2**20
    assert peak < weights.nbytes + 4 * 2**20
