"""Llamas with an activation, a rotation or a fused projection of their own: Arcee, Baichuan, ERNIE 4.5, Helium,
HunYuan, InternLM."""

from __future__ import annotations

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, WeightNames
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS

ARCEE_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "up": (LLAMA_LAYER + "mlp.up_proj",)}
HUNYUAN_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "q_norm": (LLAMA_LAYER + "self_attn.query_layernorm",),
    "k_norm": (LLAMA_LAYER + "self_attn.key_layernorm",),
}
INTERNLM2_WEIGHTS: WeightNames = {
    "embedding": ("model.tok_embeddings",),
    "final_norm": ("model.norm",),
    "lm_head": ("output",),
    "attention_norm_before": (LLAMA_LAYER + "attention_norm",),
    "qkv": (LLAMA_LAYER + "attention.wqkv",),
    "out": (LLAMA_LAYER + "attention.wo",),
    "mlp_norm_before": (LLAMA_LAYER + "ffn_norm",),
    "up": tuple(LLAMA_LAYER + f"feed_forward.{part}" for part in ("w1", "w3")),
    "down": (LLAMA_LAYER + "feed_forward.w2",),
}
BAICHUAN_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "qkv": (LLAMA_LAYER + "self_attn.W_pack",)}
BOTH_IDS = {"bos_token_id": 1, "eos_token_id": 2}

LLAMA_VARIANTS: dict[str, Architecture] = {
    "ArceeForCausalLM": Architecture(
        model_type="arcee",
        base_classes=("ArceeModel",),
        weights=ARCEE_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        gated=False,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    # Of the first generation and the second: 13B has ALiBi, and no context length that these keys would name.
    "BaichuanForCausalLM": Architecture(
        model_type="baichuan",
        base_classes=("BaiChuanForCausalLM", "BaichuanModel"),
        weights=BAICHUAN_WEIGHTS,
        other_weights={"qkv": LLAMA_WEIGHTS["qkv"]},
        defaults={**LLAMA_DEFAULTS, **BOTH_IDS, "max_position_embeddings": 4096},
        derived={"has_alibi": rules.baichuan_alibi, "normalised_head": rules.baichuan_head},
        refused={"has_alibi": "Baichuan 13B has ALiBi instead of rotary position embeddings"},
        normalised_head="normalised_head",
    ),
    "Ernie4_5ForCausalLM": Architecture(
        model_type="ernie4_5",
        base_classes=("Ernie4_5Model", "Ernie4_5_ForCausalLM"),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            **BOTH_IDS,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        rope_interleaved=True,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "HeliumForCausalLM": Architecture(
        model_type="helium",
        base_classes=("HeliumModel",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            **BOTH_IDS,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
        rope_interleaved=True,
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        model_type="hunyuan_v1_dense",
        base_classes=("HunYuanDenseV1Model",),
        weights=HUNYUAN_WEIGHTS,
        defaults={**LLAMA_DEFAULTS, **BOTH_IDS, "rms_norm_eps": 1e-5},
        qk_norm=True,
        qk_norm_form="rotated_head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    "InternLM2ForCausalLM": Architecture(
        model_type="internlm2",
        base_classes=("InternLM2Model",),
        weights=INTERNLM2_WEIGHTS,
        other_weights={"qkv": tuple(LLAMA_LAYER + f"attention.w{part}" for part in "qkv")},
        defaults={**LLAMA_DEFAULTS, **BOTH_IDS, "bias": False},
        qkv_order=rules.by_kv_head,
        qkv_bias="bias",
        out_bias="bias",
    ),
    "InternLM3ForCausalLM": Architecture(
        model_type="internlm3",
        base_classes=("InternLM3Model",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            **BOTH_IDS,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        qkv_bias="attention_bias",
        out_bias="mlp_bias",
        mlp_bias="mlp_bias",
    ),
}
