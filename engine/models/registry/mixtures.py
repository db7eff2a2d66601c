"""Decoders with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.engine.models.fields import Fields
from tessera.engine.models.registry import experts, rules
from tessera.engine.models.registry.architecture import Architecture, WeightNames
from tessera.engine.models.registry.experts import MAX_INNER, ExpertForm, ExpertsRule
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS, QWEN_DEFAULTS
from tessera.engine.models.registry.predictor import DEEPSEEK_FORM
from tessera.engine.models.registry.scaled import SCALED_FAMILY
from tessera.engine.ops.layer_interface import SWIGLU_ALPHA, SWIGLU_LIMIT

MLP = LLAMA_LAYER + "mlp."
SPARSE = LLAMA_LAYER + "block_sparse_moe."

QWEN_MOE_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "router": (MLP + "gate",),
    "shared_up": tuple(MLP + f"shared_expert.{part}_proj" for part in ("gate", "up")),
    "shared_down": (MLP + "shared_expert.down_proj",),
    "shared_gate": (MLP + "shared_expert_gate",),
}
GLM4_MOE_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "router": (MLP + "gate",),
    "router_correction": (MLP + "gate.e_score_correction_bias",),
    "shared_up": tuple(MLP + f"shared_experts.{part}_proj" for part in ("gate", "up")),
    "shared_down": (MLP + "shared_experts.down_proj",),
}
MIXTRAL_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "router": (SPARSE + "gate",)}
GRANITE_MOE_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "router": (SPARSE + "router.layer",)}
GPT_OSS_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "sinks": (LLAMA_LAYER + "self_attn.sinks",),
    "router": (MLP + "router",),
}

EACH_EXPERT = ExpertForm(
    tuple(MLP + f"experts.{{e}}.{part}_proj.weight" for part in ("gate", "up")),
    (MLP + "experts.{e}.down_proj.weight",),
)
EACH_MIXTRAL_EXPERT = ExpertForm(
    tuple(SPARSE + f"experts.{{e}}.{part}.weight" for part in ("w1", "w3")), (SPARSE + "experts.{e}.w2.weight",)
)
# As Hugging Face transformers keeps experts in memory, which some savers write as it is.
FUSED = ExpertForm((MLP + "experts.gate_up_proj",), (MLP + "experts.down_proj",))
# As Qwen3-VL's checkpoints have them, by the same names.
FUSED_TRANSPOSED = replace(FUSED, transposed=True)
GRANITE_EXPERTS = ExpertForm((SPARSE + "input_linear.weight",), (SPARSE + "output_linear.weight",))
GPT_OSS_EXPERTS = replace(
    FUSED,
    up_bias=(MLP + "experts.gate_up_proj_bias",),
    down_bias=(MLP + "experts.down_proj_bias",),
    transposed=True,
    interleaved=True,
)

MIXTRAL_RULE = ExpertsRule(
    forms=(EACH_MIXTRAL_EXPERT, FUSED),
    routing=experts.softmax_normalised,
    num_experts="num_local_experts",
    inner_size="intermediate_size",
)
QWEN_MOE_RULE = ExpertsRule(
    forms=(EACH_EXPERT, FUSED, FUSED_TRANSPOSED), routing=experts.softmax, layers=experts.sparse_layers
)
QWEN_MOE_DEFAULTS: dict[str, Any] = {**QWEN_DEFAULTS, "norm_topk_prob": False, "decoder_sparse_step": 1}


def _qwen_shared_size(config: Fields) -> int:
    return config.integer("shared_expert_intermediate_size", 1, MAX_INNER)


def _glm_shared_size(config: Fields) -> int | None:
    count = config.integer("n_shared_experts", 0, 64)
    return count * config.integer("moe_intermediate_size", 1, MAX_INNER // 64) if count else None


MIXTURES: dict[str, Architecture] = {
    "MixtralForCausalLM": Architecture(
        model_type="mixtral",
        base_classes=("MixtralModel",),
        weights=MIXTRAL_WEIGHTS,
        experts=MIXTRAL_RULE,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        windows=rules.same_window,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        model_type="qwen2_moe",
        base_classes=("Qwen2MoeModel",),
        weights=QWEN_MOE_WEIGHTS,
        experts=replace(QWEN_MOE_RULE, shared_size=_qwen_shared_size, shared_gate=True),
        defaults={
            **QWEN_MOE_DEFAULTS,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
        windows=rules.upper_windows,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe",
        base_classes=("Qwen3MoeModel",),
        weights=QWEN_MOE_WEIGHTS,
        experts=QWEN_MOE_RULE,
        defaults={
            **QWEN_MOE_DEFAULTS,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "moe_intermediate_size": 768,
        },
        aliases={"num_local_experts": "num_experts"},  # as transformers 5 saves it
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windows=rules.same_window_if_used,
    ),
    "GraniteMoeForCausalLM": replace(
        SCALED_FAMILY["GraniteForCausalLM"],
        model_type="granitemoe",
        base_classes=("GraniteMoeModel",),
        weights=GRANITE_MOE_WEIGHTS,
        experts=ExpertsRule(
            forms=(GRANITE_EXPERTS,),
            routing=experts.softmax_of_chosen,
            num_experts="num_local_experts",
            inner_size="intermediate_size",
        ),
        defaults={
            **SCALED_FAMILY["GraniteForCausalLM"].defaults,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "PhimoeForCausalLM": Architecture(
        model_type="phimoe",
        base_classes=("PhimoeModel", "PhiMoEForCausalLM"),
        weights=MIXTRAL_WEIGHTS,
        experts=replace(MIXTRAL_RULE, routing=experts.sparsemixer),
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "router_jitter_noise": 0.01,
            "lm_head_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        norm="layernorm",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        head_bias="lm_head_bias",
        windows=rules.same_window,
    ),
    "Glm4MoeForCausalLM": Architecture(
        model_type="glm4_moe",
        base_classes=("Glm4MoeModel",),
        weights=GLM4_MOE_WEIGHTS,
        experts=ExpertsRule(
            forms=(EACH_EXPERT, FUSED),
            routing=experts.grouped_sigmoid,
            num_experts="n_routed_experts",
            layers=experts.layers_after_dense,
            correction=True,
            shared_size=_glm_shared_size,
        ),
        predictor=DEEPSEEK_FORM,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
        },
        qk_norm="use_qk_norm",
        qkv_bias="attention_bias",
    ),
    "GptOssForCausalLM": Architecture(
        model_type="gpt_oss",
        base_classes=("GptOssModel",),
        weights=GPT_OSS_WEIGHTS,
        experts=ExpertsRule(
            forms=(replace(GPT_OSS_EXPERTS, transposed=False, mxfp4=True), GPT_OSS_EXPERTS),
            routing=experts.softmax_of_chosen,
            num_experts="num_local_experts",
            inner_size="intermediate_size",
            activation="clamped_swiglu_mul",
            expert_bias=True,
            router_bias=True,
        ),
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        required={"swiglu_alpha": lambda config: SWIGLU_ALPHA, "swiglu_limit": lambda config: SWIGLU_LIMIT},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks=True,
        windows=rules.alternating_windows,
    ),
}
