"""Mixtures of experts that put together what other families have: OLMoE, dots.llm1, ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from tessera.engine.models.fields import Fields
from tessera.engine.models.registry import experts, rules
from tessera.engine.models.registry.architecture import Architecture, WeightNames
from tessera.engine.models.registry.experts import MAX_INNER, ExpertsRule
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_WEIGHTS
from tessera.engine.models.registry.llama_variants import LLAMA_VARIANTS
from tessera.engine.models.registry.mixtures import EACH_EXPERT, FUSED, GLM4_MOE_WEIGHTS, MIXTURES, MLP
from tessera.engine.models.registry.predictor import ERNIE_FORM

OLMOE_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "router": (MLP + "gate",)}
ERNIE_MOE_WEIGHTS: WeightNames = {
    **GLM4_MOE_WEIGHTS,
    "router_correction": (MLP + "moe_statics.e_score_correction_bias",),
}


def _ernie_shared_size(config: Fields) -> int | None:
    count = config.integer("moe_num_shared_experts", 0, 64)
    return count * config.integer("moe_intermediate_size", 1, MAX_INNER // 64) if count else None


GLM4_MOE = MIXTURES["Glm4MoeForCausalLM"]
assert GLM4_MOE.experts is not None
ERNIE = LLAMA_VARIANTS["Ernie4_5ForCausalLM"]

MIXTURE_VARIANTS: dict[str, Architecture] = {
    "OlmoeForCausalLM": Architecture(
        model_type="olmoe",
        base_classes=("OlmoeModel",),
        weights=OLMOE_WEIGHTS,
        experts=ExpertsRule(forms=(EACH_EXPERT, FUSED), routing=experts.softmax, inner_size="intermediate_size"),
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
            "eos_token_id": 50279,
        },
        refused={"clip_qkv": "queries, keys and values are not clipped"},
        qk_norm=True,
        qk_norm_form="width",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    "Dots1ForCausalLM": replace(
        GLM4_MOE,
        model_type="dots1",
        base_classes=("Dots1Model",),
        predictor=None,
        defaults={
            **LLAMA_DEFAULTS,
            "num_key_value_heads": 32,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "max_window_layers": 62,
        },
        defaults_if_absent={"sliding_window": 4096},
        qk_norm=True,
        out_bias="attention_bias",
        windows=rules.windows_above,
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        ERNIE,
        model_type="ernie4_5_moe",
        base_classes=("Ernie4_5_MoeModel",),
        weights=ERNIE_MOE_WEIGHTS,
        experts=ExpertsRule(
            forms=(EACH_EXPERT, FUSED),
            routing=experts.softmax_normalised,
            layers=experts.layers_between,
            correction=True,
            shared_size=_ernie_shared_size,
        ),
        predictor=ERNIE_FORM,
        defaults={
            **ERNIE.defaults,
            "num_key_value_heads": 4,
            "head_dim": None,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        refused={"use_bias": "projections have no biases"},
    ),
}
