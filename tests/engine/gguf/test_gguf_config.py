"""Configuration and names of weights from GGUF metadata, in Hugging Face's terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.model import open_gguf
from tessera.engine.models.config import ModelConfig, parse_config
from tessera.engine.models.gguf.config import read_config
from tessera.engine.models.rope import RopeConfig, inverse_frequencies
from tessera.engine.models.weights.gguf_checkpoint import GGUFCheckpoint
from tessera.engine.models.weights.safetensors import Checkpoint
from tests.engine.gguf.writer import Stored, write_gguf

HEAD_DIM = 8


def keys(architecture: str = "llama", **changed: Any) -> dict[str, Any]:
    values = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in values.items() if value is not None
    }


def tensors(*, head: bool = False, **more: Stored) -> dict[str, Stored]:
    found = {"token_embd.weight": Stored("Q8_0", (64, 32), bytes(64 * 34))}
    if head:
        found["output.weight"] = Stored("F16", (64, 32), bytes(64 * 64))
    return found | {name.replace("__", "."): tensor for name, tensor in more.items()}


def rope_of(config: ModelConfig) -> RopeConfig:
    (rope,) = config.ropes
    return rope


def norm_eps(config: ModelConfig) -> float:
    norm = config.final_norm or config.embedding_norm
    assert norm is not None
    return norm.eps


def config_of(folder: Path, metadata: dict[str, Any], stored: dict[str, Stored] | None = None) -> ModelConfig:
    path = write_gguf(folder / "m.gguf", metadata, tensors() if stored is None else stored)
    return parse_config(read_config(open_gguf(path)), {}, str(path))


@pytest.mark.parametrize("head", [False, True])
def test_the_metadata_of_a_llama_become_its_configuration(tmp_path: Path, head: bool) -> None:
    config = config_of(tmp_path, keys(), tensors(head=head))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.layers[0].mlp.inner_size) == (64, 32, 48)
    attention = config.layers[1].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 8)
    assert config.num_layers == 2
    assert norm_eps(config) == 1e-5  # not float32's neighbour
    assert config.max_position_embeddings == 4096
    assert rope_of(config).theta == 500000.0
    assert config.tie_word_embeddings is not head


@pytest.mark.parametrize(
    ("architecture", "name", "changed"),
    [
        ("qwen2", "Qwen2ForCausalLM", {}),
        ("qwen3", "Qwen3ForCausalLM", {"attention__key_length": 16, "attention__value_length": 16}),
        ("smollm3", "SmolLM3ForCausalLM", {}),
        ("phi3", "Phi3ForCausalLM", {"attention__sliding_window": 2047}),
        ("llama", "MistralForCausalLM", {"attention__sliding_window": 1024}),
        # Models that see, of which the file has the text: llama.cpp, conversion/mistral3.py and qwenvl.py.
        ("mistral3", "MistralForCausalLM", {}),
        ("qwen2vl", "Qwen2ForCausalLM", {"rope__dimension_sections": np.array([16, 24, 24, 0], np.int32)}),
        ("qwen3vl", "Qwen3ForCausalLM", {"rope__dimension_sections": np.array([24, 20, 20, 0], np.int32)}),
        ("qwen3vlmoe", "Qwen3MoeForCausalLM", {"expert_count": 4, "expert_used_count": 2}),
        ("gpt2", "GPT2LMHeadModel", {"attention__layer_norm_epsilon": 1e-5, "attention__head_count_kv": None}),
        (
            "bert",
            "BertModel",
            {
                "attention__layer_norm_epsilon": 1e-12,
                "attention__head_count_kv": None,
                "attention__causal": False,
            },
        ),
    ],
)
def test_every_architecture_is_found(tmp_path: Path, architecture: str, name: str, changed: dict[str, Any]) -> None:
    if "attention__layer_norm_epsilon" in changed:
        changed["attention__layer_norm_rms_epsilon"] = None
    config = config_of(tmp_path, keys(architecture, **changed))
    assert config.architecture == name
    assert config.layers[0].attention.head_dim == changed.get("attention__key_length", HEAD_DIM)
    assert config.layers[1].attention.sliding_window == changed.get("attention__sliding_window")
    assert norm_eps(config) == changed.get("attention__layer_norm_epsilon", 1e-5)


def test_values_for_each_layer_are_taken_where_they_are_equal(tmp_path: Path) -> None:
    config = config_of(tmp_path, keys(attention__head_count_kv=np.array([2, 2], np.int32)))
    assert config.layers[0].attention.num_kv_heads == 2
    with pytest.raises(ModelError, match="head_count_kv must be a number, or the same for every layer"):
        config_of(tmp_path, keys(attention__head_count_kv=np.array([2, 4], np.int32)))


def test_the_first_files_of_minicpm_do_not_say_its_multipliers(tmp_path: Path) -> None:
    """Those of MiniCPM-2B: scale_emb 12, scale_depth 1.4, dim_model_base 256."""
    config = config_of(tmp_path, keys("minicpm", block_count=4))
    assert (config.embedding_multiplier, config.logits_multiplier) == (12.0, 256 / 32)
    assert config.layers[0].residual_multiplier == pytest.approx(0.7)
    said = {"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0}
    config = config_of(tmp_path, keys("minicpm", **said))
    assert (config.embedding_multiplier, config.logits_multiplier) == (2.0, 1 / 4)
    assert config.layers[0].residual_multiplier == 0.5


def test_biases_are_found_by_their_tensors(tmp_path: Path) -> None:
    biased = {"blk.0.attn_q.bias": Stored.of(np.zeros(32)), "blk.0.ffn_up.bias": Stored.of(np.zeros(48))}
    config = config_of(tmp_path, keys(), {**tensors(), **biased})
    assert (config.layers[0].attention.qkv_bias, config.layers[0].mlp.up_bias) == (True, True)
    assert config_of(tmp_path, keys()).layers[0].attention.qkv_bias is False


# -- RoPE -----------------------------------------------------------------------------------------


def frequencies(config: ModelConfig, length: int) -> list[float]:
    return inverse_frequencies(rope_of(config), length).tolist()


def test_rope_freqs_divide_each_frequency(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 3.5, 8.0], np.float32)
    plain = frequencies(config_of(tmp_path, keys()), 4096)
    config = config_of(tmp_path, keys(), tensors(rope_freqs__weight=Stored.of(factors)))
    assert frequencies(config, 4096) == (np.array(plain) / factors).tolist()
    assert rope_of(config).attention_factor == 1.0
    assert config.longest_context == 4096


def test_rope_freqs_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="one plain number for each of 4 rotary pairs"):
        config_of(tmp_path, keys(), tensors(rope_freqs__weight=Stored.of(np.ones(5))))


def test_the_first_files_of_gemma2_and_phi3_do_not_say_their_windows(tmp_path: Path) -> None:
    """microsoft/Phi-3-mini-4k-instruct-gguf is as issues 5956 of Ollama and 2183 of ik_llama.cpp show it; Gemma 2's
    config.json has 4096 for every second layer."""

    def windows(*args: Any, **changed: Any) -> list[int | None]:
        return [layer.attention.sliding_window for layer in config_of(tmp_path, keys(*args, **changed)).layers]

    assert windows("phi3") == [2047, 2047]
    assert windows("phi3", context_length=16384) == windows("phi3", attention__sliding_window=0) == [None, None]
    assert windows("gemma2") == [4096, None]
    assert windows("gemma2", attention__sliding_window=1024) == [1024, None]


def test_phi3_takes_the_factors_of_either_side_of_its_old_context(tmp_path: Path) -> None:
    short, long = np.array([1, 1, 1.5, 2]), np.array([1, 2, 4, 8])
    stored = tensors(rope_factors_short__weight=Stored.of(short), rope_factors_long__weight=Stored.of(long))
    scaling = {"rope__scaling__original_context_length": 1024, "rope__scaling__attn_factor": 1.25}
    config = config_of(tmp_path, keys("phi3", **scaling), stored)
    plain = np.array(frequencies(config_of(tmp_path, keys()), 1024))
    assert frequencies(config, 1024) == (plain / short).tolist()
    assert frequencies(config, 4096) == (plain / long).tolist()
    assert rope_of(config).attention_factor == 1.25


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope(tmp_path: Path, kind: str) -> None:
    scaling = {"rope__scaling__type": kind, "rope__scaling__factor": 4.0}
    config = config_of(tmp_path, keys("qwen2", **scaling, rope__scaling__original_context_length=1024))
    assert (rope_of(config).kind, rope_of(config).factor) == (kind, 4.0)
    if kind == "yarn":
        assert rope_of(config).original_max_len == 1024
        assert rope_of(config).attention_factor == pytest.approx(1 + 0.1 * np.log(4))


def test_part_of_a_head_may_rotate(tmp_path: Path) -> None:
    config = config_of(tmp_path, keys("qwen2", rope__dimension_count=4))
    assert rope_of(config).rotary_dim == 4


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (keys("mamba"), "the architecture 'mamba' is not supported; supported in GGUF are arcee"),
        ({}, "general.architecture is missing; it must be a string"),
        (keys(block_count=None), "llama.block_count is missing; it must be an integer from 1"),
        (keys(attention__head_count=0), "llama.attention.head_count must be an integer from 1"),
        (keys(attention__key_length=16), "llama.attention.value_length"),
        (keys("falcon", expert_count=8), "mixtures of experts of the architecture 'falcon' are not supported; suppor"),
        (keys(expert_count=8), "llama.expert_used_count is missing; it must be an integer from 1"),
        (keys(rope__scaling__type="ntk"), "llama.rope.scaling.type must be none, linear, yarn or longrope, not 'ntk'"),
        (keys(rope__dimension_count=9), "rope.dimension_count must be from 1 to the length of keys, 8, not 9"),
        (keys(context_length="long"), "llama.context_length must be an integer from 1 to 2147483647, not 'long'"),
        (keys("qwen2", attention__causal=False), "is_causal must be true: a decoder's tokens see those before them"),
        (keys("mistral3", attention__temperature_scale=0.1), "mistral3.attention.temperature_scale must be 0: queries"),
        (keys(block_count=5000), "num_hidden_layers must be an integer from 1 to 1024, not 5000"),
    ],
)
def test_fault_gguf_metadata_that_make_no_model_are_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    if "value_length" in message:
        metadata = {**metadata, "llama.attention.value_length": 8}
    with pytest.raises(ModelError) as refused:
        config_of(tmp_path, metadata)
    assert message in str(refused.value)


def test_a_vocabulary_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tensor token_embd.weight, so it holds no model"):
        config_of(tmp_path, keys(), {})


# -- special tokens -------------------------------------------------------------------------------


def with_tokens(special: dict[str, int], **changed: Any) -> dict[str, Any]:
    words = ["a", "b", *special]
    types = np.array([1, 1, *special.values()], np.int32)
    more = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    return {**keys(), "tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": types, **more}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (with_tokens({"<s>": 3, "</s>": 3}, eos_token_id=3), (3,)),
        (with_tokens({"<|eot_id|>": 3, "<|end_of_text|>": 3}, eos_token_id=3), (2, 3)),
        (with_tokens({"</s>": 1, "<end>": 3}, eos_token_id=3), (3,)),
        (with_tokens({"x": 3}, eos_token_id=4294967295), ()),
        (with_tokens({"x": 3}, eos_token_id=0, eot_token_id=1), (0, 1)),
        (with_tokens({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, eos_token_id=2), (2, 3)),
    ],
)
def test_completions_end_at_the_tokens_that_the_file_names_or_that_are_known(
    tmp_path: Path, metadata: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert config_of(tmp_path, metadata).eos_token_ids == expected


# -- weights --------------------------------------------------------------------------------------


def rows_of(folder: Path, architecture: str, name: str, **changed: Any) -> list[int]:
    """The order in which the rows of a weight come, whose stored rows are numbered."""
    numbered = np.repeat(np.arange(32, dtype=np.float32)[:, None], 32, axis=1)
    stored = {**tensors(), "blk.1.attn_q.weight": Stored.of(numbered)}
    path = write_gguf(folder / "m.gguf", keys(architecture, **changed), stored)
    return GGUFCheckpoint(path).tensor(name)[:][:, 0].astype(int).tolist()


def test_rows_of_queries_are_brought_back_in_order(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    head = [0, 2, 4, 6, 1, 3, 5, 7]
    assert rows_of(tmp_path, "llama", name) == [8 * group + row for group in range(4) for row in head]
    assert rows_of(tmp_path, "mistral3", name) == rows_of(tmp_path, "llama", name)
    assert rows_of(tmp_path, "qwen2", name) == rows_of(tmp_path, "qwen2vl", name) == list(range(32))
    partial = [0, 2, 1, 3, 4, 5, 6, 7]
    assert rows_of(tmp_path, "llama", name, rope__dimension_count=4)[:8] == partial


def test_some_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    stored = np.random.default_rng(1).integers(0, 256, (32, 34), dtype=np.uint8)
    stored[:, 1] &= 0x3F
    path = write_gguf(
        tmp_path / "m.gguf", keys(), {**tensors(), "blk.0.attn_k.weight": Stored("Q8_0", (32, 32), stored.tobytes())}
    )
    tensor = GGUFCheckpoint(path).tensor("model.layers.0.self_attn.k_proj.weight")
    assert tensor.shape == (32, 32)
    whole = tensor[:]
    assert np.array_equal(tensor[5:9], whole[5:9])
    assert sorted(map(bytes, tensor.blocks(slice(None)))) == sorted(map(bytes, stored))


def test_tensors_without_a_place_keep_their_names(tmp_path: Path) -> None:
    one = Stored.of(np.ones(4))
    names = ("blk.0.attn_sinks.weight", "blk.00.attn_norm.weight", "v.patch_embd", "rope_freqs.weight")
    path = write_gguf(tmp_path / "m.gguf", keys(), {**tensors(), **dict.fromkeys(names, one)})
    assert GGUFCheckpoint(path).names == {"model.embed_tokens.weight", *names[:3]}


@pytest.mark.shared
def test_stories260k_is_the_same_model_as_its_safetensors(shared_models: Path) -> None:
    folder = shared_models / "stories260K"
    theirs, ours = Checkpoint(folder), GGUFCheckpoint(folder / "stories260K.gguf")
    assert ours.names == theirs.names | {"lm_head.weight"}
    for name in theirs.names:
        assert np.array_equal(theirs.tensor(name), ours.tensor(name)[:]), name
