"""Configurations as they are published, with the keys that they have and lack; sizes that decide nothing are small."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.config import ModelConfig, parse_config
from tessera.engine.models.text_part import text_part

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}

# huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B, config.json: 64 layers, of which every fourth has no window.
EXAONE4_32B: dict[str, Any] = {
    **SIZES,
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "num_hidden_layers": 8,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "vocab_size": 256,
}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.sliding_window for layer in parse_config(config, {}).layers]


def test_exaone4_writes_its_pattern_of_windows_in_letters() -> None:
    assert windows(EXAONE4_32B) == [4096, 4096, 4096, None] * 2
    # transformers, configuration_exaone4.py: the letters say it where no list does.
    assert windows({**EXAONE4_32B, "layer_types": None}) == [4096, 4096, 4096, None] * 2
    # huggingface.co/LGAI-EXAONE/EXAONE-4.0-1.2B: no layer has a window.
    small = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 8}
    assert windows({**EXAONE4_32B, **small}) == [None] * 8


@pytest.mark.parametrize("pattern", ["", "LXG", 0])
def test_another_pattern_of_windows_is_refused(pattern: str | int) -> None:
    with pytest.raises(ModelError, match="sliding_window_pattern"):
        windows({**EXAONE4_32B, "layer_types": None, "sliding_window_pattern": pattern})


def of_text(section: dict[str, Any], outer: str = "Mistral3") -> ModelConfig:
    text = text_part({"architectures": [f"{outer}ForConditionalGeneration"], "text_config": section})
    assert text is not None
    return parse_config(text, {})


def test_null_in_a_section_is_no_default() -> None:
    # huggingface.co/mistralai/Mistral-Small-3.1-24B-Instruct-2503, and pixtral-12b of mistral-community.
    section = {**SIZES, "model_type": "mistral", "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}
    assert {layer.attention.sliding_window for layer in of_text({**section, "sliding_window": None}).layers} == {None}
    assert {layer.attention.sliding_window for layer in of_text(section).layers} == {4096}
    # The model's own word counts where a section says null.
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**section, "eos_token_id": None}}
    text = text_part({**whole, "eos_token_id": 5})
    assert text is not None
    assert text["eos_token_id"] == 5


def test_the_type_of_a_section_counts_before_its_class() -> None:
    # huggingface.co/HuggingFaceTB/SmolVLM-256M-Instruct: a class of no library, and the type of Llama.
    section = {**SIZES, "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 256}
    assert of_text({**section, "architectures": ["VLlama3ForCausalLM"]}, "Idefics3").architecture == "LlamaForCausalLM"


def test_a_section_leaves_out_the_sizes_that_its_class_has_by_default() -> None:
    # huggingface.co/llava-hf/llava-1.5-7b-hf, all of its text_config that decides anything.
    llava = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama"}
    config = of_text({**llava, "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064}, "Llava")
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    assert (config.vocab_size, config.hidden_size, config.num_layers, mlp.inner_size) == (32064, 4096, 32, 11008)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 32, 128)
    # huggingface.co/HuggingFaceTB/SmolVLM2-2.2B-Instruct says all sizes but its 32 heads.
    smolvlm = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
    assert of_text({**smolvlm, "vocab_size": 49280, "head_dim": 64}, "SmolVLM").num_heads == 32
    # huggingface.co/CohereLabs/aya-vision-8b leaves out the vocabulary, and so may one of Cohere's first generation.
    aya = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    for model_type in ("cohere", "cohere2"):
        assert of_text({**aya, "model_type": model_type}, "AyaVision").vocab_size == 256000


def test_command_r_has_the_context_that_model_max_length_says() -> None:
    # huggingface.co/CohereForAI/c4ai-command-r-v01 and -plus; c4ai-command-r-08-2024 and aya-23-8B lack the key.
    config = {**SIZES, "architectures": ["CohereForCausalLM"], "num_hidden_layers": 2, "vocab_size": 256}
    assert (
        parse_config({**config, "max_position_embeddings": 8192, "model_max_length": 131072}, {}).usual_context
        == 131072
    )
    assert parse_config({**config, "max_position_embeddings": 131072}, {}).usual_context == 131072
    assert parse_config({**config, "max_position_embeddings": 8192}, {}).usual_context == 8192


def test_attn_factor_multiplies_the_temperature_of_yarn() -> None:
    # huggingface.co/deepseek-ai/DeepSeek-R1-0528-Qwen3-8B; github.com/deepseek-ai/DeepSeek-R1/issues/684: as it says.
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"}
    config = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "vocab_size": 256}

    def attention_factor(**more: float) -> float:
        parsed = parse_config({**config, "max_position_embeddings": 131072, "rope_scaling": {**scaling, **more}}, {})
        return parsed.ropes[0].attention_factor

    assert attention_factor(attn_factor=0.8782488562869419) == pytest.approx(1.0)
    assert attention_factor() == pytest.approx(1.1386294)
    assert attention_factor(attention_factor=1.5, attn_factor=0.5) == 1.5


def test_a_model_whose_prompts_see_both_ways_is_refused() -> None:
    # huggingface.co/google/paligemma-3b-pt-224; transformers, modeling_paligemma.py: create_causal_mask_mapping.
    text = {**SIZES, "model_type": "gemma", "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}
    whole = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma", "text_config": text}
    assert text_part(whole) is None
    with pytest.raises(ModelError, match='architecture "PaliGemmaForConditionalGeneration" is not supported'):
        parse_config(whole, {})


def test_a_decoder_whose_tokens_see_both_sides_is_refused() -> None:
    # The key of embedding models made from decoders: transformers, masking_utils.py, create_causal_mask.
    config = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "vocab_size": 256}
    assert parse_config({**config, "is_causal": True}, {}).num_layers == 2
    with pytest.raises(ModelError, match="is_causal must be true"):
        parse_config({**config, "is_causal": False}, {})
