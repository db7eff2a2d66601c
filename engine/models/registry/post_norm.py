"""Llamas that normalise what the halves of a layer give instead of what they take, or both: OLMo 2 and 3, EXAONE 4, GLM
4."""

from __future__ import annotations

from typing import Any

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, RopeKeys, WeightNames
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS

POST_NORM_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "attention_norm_after": (LLAMA_LAYER + "post_attention_layernorm",),
    "mlp_norm_after": (LLAMA_LAYER + "post_feedforward_layernorm",),
}
GLM_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "up": (LLAMA_LAYER + "mlp.gate_up_proj",)}
GLM4_WEIGHTS: WeightNames = {
    **GLM_WEIGHTS,
    "attention_norm_after": (LLAMA_LAYER + "post_self_attn_layernorm",),
    "mlp_norm_after": (LLAMA_LAYER + "post_mlp_layernorm",),
}
OLMO2_DEFAULTS: dict[str, Any] = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
GLM_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

POST_NORM_FAMILY: dict[str, Architecture] = {
    "Olmo2ForCausalLM": Architecture(
        model_type="olmo2",
        base_classes=("Olmo2Model",),
        weights=POST_NORM_WEIGHTS,
        defaults=OLMO2_DEFAULTS,
        norm_places=("after",),
        qk_norm=True,
        qk_norm_form="width",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    "Olmo3ForCausalLM": Architecture(
        model_type="olmo3",
        base_classes=("Olmo3Model",),
        weights=POST_NORM_WEIGHTS,
        defaults={
            **OLMO2_DEFAULTS,
            "rope_theta": 500000.0,
            "sliding_window_pattern": 4,
        },
        defaults_if_absent={"sliding_window": 4096},
        norm_places=("after",),
        qk_norm=True,
        qk_norm_form="width",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        window_rope=(
            RopeKeys("full_attention", "rope_theta"),
            RopeKeys("sliding_attention", "rope_theta", scaled=False),
        ),
        windows=rules.patterned_windows,
    ),
    "Exaone4ForCausalLM": Architecture(
        model_type="exaone4",
        base_classes=("Exaone4Model",),
        weights=POST_NORM_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        defaults_if_absent={"sliding_window": 4096},
        norm_places=("after",),
        qk_norm=True,
        rope_layers=rules.exaone4_rope_layers,
        windows=rules.patterned_windows,
    ),
    "GlmForCausalLM": Architecture(
        model_type="glm",
        base_classes=("GlmModel",),
        weights=GLM_WEIGHTS,
        other_weights={"qkv": (LLAMA_LAYER + "self_attn.qkv_proj",)},
        defaults=GLM_DEFAULTS,
        rope_interleaved=True,
        qkv_bias="attention_bias",
    ),
    "Glm4ForCausalLM": Architecture(
        model_type="glm4",
        base_classes=("Glm4Model",),
        weights=GLM4_WEIGHTS,
        defaults=GLM_DEFAULTS,
        norm_places=("before", "after"),
        rope_interleaved=True,
        qkv_bias="attention_bias",
    ),
}
