"""Llama and its relatives: RMSNorm, gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, ClassifierRule, WeightNames
from tessera.engine.models.registry.predictor import LAYER, MIMO_FORM

LLAMA_LAYER = LAYER
LLAMA_WEIGHTS: WeightNames = {
    "embedding": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "lm_head": ("lm_head",),
    "classifier": ("score",),
    "attention_norm_before": (LLAMA_LAYER + "input_layernorm",),
    "qkv": tuple(LLAMA_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
    "q_norm": (LLAMA_LAYER + "self_attn.q_norm",),
    "k_norm": (LLAMA_LAYER + "self_attn.k_norm",),
    "out": (LLAMA_LAYER + "self_attn.o_proj",),
    "mlp_norm_before": (LLAMA_LAYER + "post_attention_layernorm",),
    "up": tuple(LLAMA_LAYER + f"mlp.{part}_proj" for part in ("gate", "up")),
    "down": (LLAMA_LAYER + "mlp.down_proj",),
}
PHI3_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "qkv": (LLAMA_LAYER + "self_attn.qkv_proj",),
    "up": (LLAMA_LAYER + "mlp.gate_up_proj",),
}
LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 2048,
}
QWEN_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def score_head(name: str) -> ClassifierRule:
    """As Hugging Face transformers gives it to every decoder: of the last token, without a bias."""
    return ClassifierRule((f"{name}ForSequenceClassification",), pooling="last", bias=False)


QWEN2 = Architecture(
    model_type="qwen2",
    base_classes=("Qwen2Model",),
    weights=LLAMA_WEIGHTS,
    classifier=score_head("Qwen2"),
    defaults=QWEN_DEFAULTS,
    qkv_bias=True,
    windows=rules.upper_windows,
)

LLAMA_FAMILY: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        base_classes=("LlamaModel", "LLaMAForCausalLM"),
        weights=LLAMA_WEIGHTS,
        classifier=score_head("Llama"),
        defaults={**LLAMA_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral",
        base_classes=("MistralModel",),
        weights=LLAMA_WEIGHTS,
        classifier=score_head("Mistral"),
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        defaults_if_absent={"sliding_window": 4096},
        windows=rules.same_window,
    ),
    "MinistralForCausalLM": Architecture(
        model_type="ministral",
        base_classes=("MinistralModel",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        defaults_if_absent={"sliding_window": 4096},
        windows=rules.every_window,
    ),
    "Qwen2ForCausalLM": QWEN2,
    "MiMoForCausalLM": replace(
        QWEN2,
        model_type="mimo",
        base_classes=("MiMoModel",),
        classifier=None,
        predictor=MIMO_FORM,
        qkv_bias="attention_bias",
        defaults={**QWEN_DEFAULTS, "attention_bias": True},
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        base_classes=("Qwen3Model",),
        weights=LLAMA_WEIGHTS,
        classifier=score_head("Qwen3"),
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windows=rules.upper_windows,
    ),
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        base_classes=("SmolLM3Model",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        rope_layers=rules.listed_rope_layers,
        windows=rules.unrotated_windows,
    ),
    "Phi3ForCausalLM": Architecture(
        model_type="phi3",
        base_classes=("Phi3Model",),
        weights=PHI3_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        windows=rules.same_window,
    ),
    "SeedOssForCausalLM": Architecture(
        model_type="seed_oss",
        base_classes=("SeedOssModel",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
}
