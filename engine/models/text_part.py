"""The language model inside of a multimodal one: what of its configuration the text needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.engine.models.registry import architecture_name

SECTIONS = ("text_config", "llm_config", "language_config")
TIED = "tie_word_embeddings"
OUTER_KEYS = (TIED, "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "vocab_size")
CLASS_ENDING = "ForConditionalGeneration"
PREFIX_TYPES = ("paligemma",)  # whose prompts see both sides of their text
# Of models that see, by the layers of the language model in them. Their rotary embedding has three positions for an
# image's patch, which are equal for a token of text: that is the usual one.
TEXT_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
# What their classes have by default and the layers have not.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_moe_text": {"attention_bias": True},
}
# Savers leave out of a section what its class has by default (Hugging Face transformers, configuration_*.py).
SIZE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES = {
    "cohere": (256000, 8192, 22528, 40, 64),
    "cohere2": (256000, 8192, 22528, 40, 64),
    "gemma": (256000, 3072, 24576, 28, 16),
    "gemma2": (256000, 2304, 9216, 26, 8),
    "granite": (32000, 4096, 11008, 32, 32),
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32),
}
ROPE_KEYS = ("rope_scaling", "rope_parameters")
MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def text_part(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json of the language model in a model of `...ForConditionalGeneration`; None for all others.

    It stands in a section of its own or, as older savers have it, beside the keys of the part that sees.
    """
    listed = values.get("architectures")
    if not isinstance(listed, list) or not listed or not str(listed[0]).endswith(CLASS_ENDING):
        return None
    if values.get("model_type") in PREFIX_TYPES:
        return None
    section = next((values[key] for key in SECTIONS if isinstance(values.get(key), dict)), None)
    if section is None and values.get("model_type") not in TEXT_TYPES:
        return None
    if section is None:
        found = {key: value for key, value in values.items() if key not in ("architectures", "vision_config")}
    else:
        found = {key: values[key] for key in OUTER_KEYS if key in values}
        found |= {key: value for key, value in section.items() if value is not None or key not in OUTER_KEYS}
        if values.get(TIED) is True:  # the model's own word; whether a head is stored is looked at later
            found[TIED] = True
    model_type = found.get("model_type")
    if isinstance(model_type, str):
        found = TEXT_DEFAULTS.get(model_type, {}) | found
        model_type = TEXT_TYPES.get(model_type, model_type)
        if architecture_name(None, model_type) is not None:  # not the class, which may be that of the whole model
            found |= {"model_type": model_type, "architectures": None}
        if section is not None:
            found = dict(zip(SIZE_KEYS, SIZES.get(model_type, ()), strict=False)) | found
    for key in ROPE_KEYS:
        if isinstance(found.get(key), dict):
            found[key] = _for_text(found[key])
    return found


def _for_text(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """RoPE's keys without those of images."""
    kept = {key: value for key, value in rope.items() if key not in MROPE_KEYS}
    for key in ("type", "rope_type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return kept or None
