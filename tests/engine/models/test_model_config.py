"""config.json -> ModelConfig: what each architecture's keys mean, and that a bad file is one clear error."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.config import ModelConfig, load_config, parse_config
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.rope import cos_sin_table, inverse_frequencies
from tessera.engine.models.specs import HalfNorms, NormSpec
from tessera.engine.tensor import bfloat16, float16, float32
from tests.support.models.tiny_families import FAMILIES
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build

LLAMA = TINY_MODELS["llama"].config


def parse(base: str = "llama", generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return parse_config({**TINY_MODELS[base].config, **changes}, generation or {})


def without(key: str, base: str = "llama") -> dict[str, Any]:
    return {name: value for name, value in TINY_MODELS[base].config.items() if name != key}


# -- meaning --------------------------------------------------------------------------------------


def test_llama() -> None:
    config = parse()
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    assert (config.num_layers, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (3, 4, 2, 16)
    assert (attention.q_size, attention.kv_size, attention.qkv_size, mlp.up_size) == (64, 32, 128, 192)
    assert mlp.activation == "silu_mul"
    assert attention.norms == mlp.norms == HalfNorms(before=NormSpec("rmsnorm", 1e-5))
    assert config.final_norm == NormSpec("rmsnorm", 1e-5)
    assert not config.tie_word_embeddings
    assert config.torch_dtype == float32
    assert all(layer == config.layers[0] for layer in config.layers)
    assert (attention.rope, attention.sliding_window) == (0, None)
    assert attention.scale == pytest.approx(1 / 4)


def test_a_silent_file_takes_the_architectures_defaults() -> None:
    config = parse_config(without("tie_word_embeddings", "smollm3"), {})
    assert config.tie_word_embeddings
    assert parse_config(without("num_key_value_heads"), {}).layers[0].attention.num_kv_heads == 4
    assert parse_config(without("torch_dtype"), {}).torch_dtype is None
    qwen3 = parse_config(without("head_dim", "qwen3"), {})
    assert qwen3.head_dims == {128}


def test_null_means_absent() -> None:
    assert parse(num_key_value_heads=None).layers[0].attention.num_kv_heads == 4
    assert parse(rope_scaling=None, attention_bias=None, head_dim=None) == parse()


def test_old_and_new_spelling_agree() -> None:
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}
    assert parse_config(new, {}) == parse(torch_dtype="bfloat16", rope_scaling={"type": "linear", "factor": 2.0})


def test_biases_per_architecture() -> None:
    def biases(base: str) -> tuple[bool, bool, bool, bool]:
        layer = parse(base).layers[0]
        return layer.attention.qkv_bias, layer.attention.out_bias, layer.mlp.up_bias, layer.mlp.down_bias

    assert biases("qwen2") == (True, False, False, False)
    assert biases("llama-tied-biases") == biases("gpt2") == (True, True, True, True)
    assert biases("qwen3") == biases("phi3") == (False, False, False, False)
    assert parse("qwen3").layers[0].attention.qk_norm == NormSpec("rmsnorm", 1e-5)
    assert parse("llama").layers[0].attention.qk_norm is None


def test_windows_per_architecture() -> None:
    def windows(config: ModelConfig) -> list[int | None]:
        return [layer.attention.sliding_window for layer in config.layers]

    assert windows(parse("mistral-window")) == [8, 8, 8]
    assert windows(parse("mistral")) == [None] * 3
    assert windows(parse("qwen2-window")) == [None, None, 8, 8]
    assert windows(parse("qwen2-window", use_sliding_window=False)) == [None] * 4
    listed = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(parse("qwen2-window", layer_types=listed)) == [8, None, None, 8]
    assert windows(parse("smollm3-window")) == [8, None, 8]
    # A window means nothing to Llama, as in transformers.
    assert windows(parse("llama", sliding_window=8)) == [None] * 3


def test_smollm3_layers_without_rope() -> None:
    def ropes(config: ModelConfig) -> list[int | None]:
        return [layer.attention.rope for layer in config.layers]

    assert ropes(parse("smollm3")) == [0, 0, 0, None]
    assert ropes(parse("smollm3", no_rope_layer_interval=2)) == [0, None, 0, None]
    assert ropes(parse("smollm3-window")) == [None, 0, None]


def test_gpt2() -> None:
    config = parse("gpt2")
    mlp = config.layers[0].mlp
    assert config.ropes == ()
    assert config.learned_positions
    assert (mlp.inner_size, mlp.up_size, mlp.activation) == (256, 256, "gelu_tanh")
    assert config.longest_context == config.max_position_embeddings == 64
    assert config.torch_dtype == float16
    variants = parse("gpt2-variants")
    assert variants.layers[0].mlp.activation == "gelu_erf"
    assert [layer.attention.scale for layer in variants.layers] == pytest.approx([1 / 4, 1 / 8, 1 / 12])
    assert parse("gpt2", scale_attn_weights=False).layers[0].attention.scale == 1.0


def test_stablelm() -> None:
    layer = parse("stablelm-parallel").layers[0]
    norm = NormSpec("layernorm", 1e-4, bias=True)
    assert (layer.parallel, layer.attention.norms, layer.mlp.norms) == (True, HalfNorms(before=norm), HalfNorms())
    assert (layer.attention.qkv_bias, layer.attention.out_bias) == (True, False)
    layer = parse("stablelm").layers[0]
    assert (layer.parallel, layer.mlp.norms) == (False, HalfNorms(before=norm))
    assert parse("stablelm").ropes[0].rotary_dim == 4, "a quarter, unless the file says otherwise"


def test_granite_multipliers() -> None:
    config = parse("granite")
    assert (config.embedding_multiplier, config.logits_multiplier) == (3.0, 1 / 2.5)
    assert {(layer.residual_multiplier, layer.attention.scale) for layer in config.layers} == {(0.4, 0.15)}


def test_exaone4_rotates_where_it_slides() -> None:
    def layers(**changes: Any) -> list[tuple[int | None, int | None]]:
        config = parse("exaone4", num_hidden_layers=4, **changes)
        return [(layer.attention.rope, layer.attention.sliding_window) for layer in config.layers]

    assert layers() == [(0, 8), (None, None)] * 2
    assert layers(layer_types=["full_attention"] * 4) == [(None, None)] * 4
    assert layers(sliding_window=None) == [(0, None)] * 4
    norms = parse("exaone4").layers[0].attention.norms
    assert norms == HalfNorms(after=NormSpec("rmsnorm", 1e-5))


def test_ministral_slides_unless_listed() -> None:
    windows = [layer.attention.sliding_window for layer in parse("ministral-pattern").layers]
    assert windows == [None, 8, None]
    assert {layer.attention.sliding_window for layer in parse("ministral").layers} == {8}
    assert {layer.attention.sliding_window for layer in parse("ministral", sliding_window=None).layers} == {None}


def test_eos_ids_of_both_files_are_merged() -> None:
    assert parse(eos_token_id=[7, 5], generation={"eos_token_id": 9}).eos_token_ids == (5, 7, 9)
    assert parse(eos_token_id=7, generation={"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    # Ids that the model cannot produce end nothing.
    assert parse(eos_token_id=[-1, 2, 128]).eos_token_ids == (2,)


def test_generation_config_is_read_from_the_folder(tmp_path: Path) -> None:
    model = TinyModel("extra", LLAMA, extra_files={"generation_config.json": '{"eos_token_id": [2, 9]}'})
    assert load_config(build(model, tmp_path)).eos_token_ids == (2, 9)


def test_dtypes() -> None:
    assert parse(torch_dtype="bfloat16").torch_dtype == bfloat16
    assert parse(torch_dtype="torch.float16").torch_dtype == parse(torch_dtype="half").torch_dtype == float16
    assert parse(torch_dtype="float64").torch_dtype == parse(dtype="float").torch_dtype == float32
    assert parse(torch_dtype="auto").torch_dtype is None
    with pytest.raises(ModelError, match=r"torch_dtype must be one of float32, .*, auto, not \"int8\""):
        parse(torch_dtype="int8")


# -- rope -----------------------------------------------------------------------------------------


def rope_table(max_model_len: int, base: str = "llama", **changes: Any) -> np.ndarray[Any, Any]:
    (rope,) = parse(base, **changes).ropes
    return cos_sin_table(rope, max_model_len)


def test_table_layout() -> None:
    table = rope_table(64)
    assert table.shape == (64, 16)
    assert table.dtype == np.float32
    assert (table[0, :8] == 1).all()
    assert (table[0, 8:] == 0).all()
    angles = 5 * 100.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(table[5], np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-6)


def test_a_long_table_equals_its_short_beginning() -> None:
    assert np.array_equal(rope_table(40_000)[:64], rope_table(64))


def test_dynamic_scaling_starts_beyond_the_trained_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    assert np.array_equal(rope_table(64, rope_scaling=scaling), rope_table(64))
    assert not np.allclose(rope_table(65, rope_scaling=scaling)[:64], rope_table(64))


def test_longrope_takes_long_factors_beyond_the_trained_length() -> None:
    (rope,) = parse("phi3-longrope-short").ropes
    plain = rope.theta ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), plain / np.array(rope.short_factor))
    np.testing.assert_allclose(inverse_frequencies(rope, 65), plain / np.array(rope.long_factor))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(64)))


@pytest.mark.parametrize("alias", ["su", "yarn"])
def test_phi3_names_longrope_otherwise(alias: str) -> None:
    scaling = TINY_MODELS["phi3-longrope-short"].config["rope_scaling"]
    assert parse("phi3-longrope-short", rope_scaling={**scaling, "type": alias}) == parse("phi3-longrope-short")


def test_the_number_of_experts_as_it_is_saved_now() -> None:
    """Hugging Face transformers 5, configuration_qwen3_moe.py, attribute_map."""
    saved = {**without("num_experts", "qwen3moe"), "num_local_experts": 8}
    assert parse_config(saved, {}) == parse("qwen3moe", num_experts=8)


def test_longest_context_follows_the_scaling() -> None:
    assert parse().longest_context == 64
    assert parse(rope_scaling={"type": "linear", "factor": 4.0}).longest_context == 256
    assert parse("llama-dynamic").longest_context == 64
    assert parse("llama-yarn").longest_context == 64
    assert parse("llama-yarn", max_position_embeddings=16).longest_context == 64
    assert parse("llama-llama3").longest_context == 64
    assert parse("phi3-longrope-long").longest_context == 128


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma", set()),
        ("gemma2", {"soft_cap", "rmsnorm_add"}),
        ("gemma2-uncapped", {"rmsnorm_add"}),
        ("olmo2", {"norm_columns", "rmsnorm_add"}),
        ("cohere", set()),
        ("cohere-norms", {"norm_columns"}),
        ("hunyuan", {"rotate"}),
        ("opt", {"relu"}),
        ("arcee", {"relu"}),
    ],
)
def test_operations_that_few_models_have(family: str, expected: set[str]) -> None:
    assert parse_config(FAMILIES[family], {}).rare_ops == expected


# -- errors ---------------------------------------------------------------------------------------


def test_unsupported_architecture_is_named_with_those_supported() -> None:
    with pytest.raises(ModelError) as error:
        parse(architectures=["MambaForCausalLM"])
    assert '"MambaForCausalLM" is not supported' in str(error.value)
    listed = str(error.value).partition("supported are ")[2].split(", ")
    assert sorted(listed) == sorted(name.removesuffix("ForCausalLM") for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None, "model_type": "mamba"}, 'it is missing, and model_type "mamba" is none of theirs'),
        ({"architectures": [], "model_type": ["llama"]}, "architectures must name"),
        ({"architectures": [3]}, "architectures must name"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must name"),
        ({"hidden_size": "64"}, 'hidden_size must be an integer from 1 to 131072, not "64"'),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 66, "head_dim": None}, "66 is not a multiple of 4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "divisor"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be an integer from 1 to 4"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 4096}, "head_dim"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_act": "relu"}, "hidden_act must be one of silu"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": list(range(65))}, "eos_token_id"),
        ({"quantization_config": {"bits": 4}}, "quant_method null is not supported"),
        ({"rope_scaling": 4}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type must be one of"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": ["a"] * 8}}, "short_factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be greater than low_freq_factor",
        ),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.2}, "rotate"),
        ({"hidden_size": 2**17, "head_dim": 64, "num_hidden_layers": 1024, "intermediate_size": 2**20}, "parameters"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_value_is_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        parse(**changes)
    assert message in str(error.value)
    assert "config.json" in str(error.value)
    assert len(str(error.value)) < 800


def test_errors_of_other_architectures() -> None:
    with pytest.raises(ModelError, match="no_rope_layers must be a list of at least 4"):
        parse("smollm3", no_rope_layers=[1, 0])
    with pytest.raises(ModelError, match="layer_types must be a list of 4 strings"):
        parse("qwen2-window", layer_types=["full_attention"])
    with pytest.raises(ModelError, match="layer_types must be a list of sliding_attention and full_attention"):
        parse("qwen2-window", layer_types=["chunked_attention"] * 4)
    with pytest.raises(ModelError, match="sliding_window must be an integer"):
        parse("mistral-window", sliding_window=0)
    with pytest.raises(ModelError, match="activation_function must be one of gelu_new"):
        parse("gpt2", activation_function="mish")
    with pytest.raises(ModelError, match="add_cross_attention"):
        parse("gpt2", add_cross_attention=True)
    with pytest.raises(ModelError, match="residual_multiplier must be a number from 1e-06 to 1e"):
        parse("granite", residual_multiplier=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b" " * (16 * 2**20 + 1), "longer than"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_malformed_file_is_one_clear_error(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError) as error:
        load_config(tmp_path)
    assert message.replace("\\", "") in str(error.value)


def test_missing_folder_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)


def test_random_values_never_get_past_as_anything_but_a_model_error() -> None:
    """Seeded fuzz: any key replaced by any kind of value gives a config or a ModelError."""
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    values: list[Any] = [None, True, -1, 0, 1, 3, 2**31, 2**70, "", "x", "linear"]
    values += [0.5, -0.0, 1e308, float("nan"), float("inf")]
    values += [[], [None], ["x"], [1, 2], {}, {"type": "yarn", "factor": 2}, {"rope_type": 5}, [[1]], {"a": {"b": 1}}]
    scaling_keys = ["type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "mscale"]
    parsed = 0
    for _ in range(4000):
        models = [*(model.config for model in TINY_MODELS.values()), *FAMILIES.values()]
        config = json.loads(json.dumps(rng.choice(models)))
        target = config
        if isinstance(config.get("rope_scaling"), dict) and rng.random() < 0.5:
            target = config["rope_scaling"]
            target[rng.choice(scaling_keys)] = rng.choice(values)
        for _ in range(rng.randint(1, 2)):
            target[rng.choice(list(target))] = rng.choice(values)
        try:
            result = parse_config(config, {"eos_token_id": rng.choice(values)} if rng.random() < 0.3 else {})
        except ModelError:
            continue
        parsed += 1
        for rope in result.ropes:
            assert np.isfinite(cos_sin_table(rope, 8)).all()
    assert parsed > 200
