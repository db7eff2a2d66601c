"""Llamas whose embeddings, residuals, attention or logits have multipliers: Granite, MiniCPM."""

from __future__ import annotations

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, WeightNames
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS

GRANITE_HYBRID_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "up": (LLAMA_LAYER + "shared_mlp.input_linear",),
    "down": (LLAMA_LAYER + "shared_mlp.output_linear",),
}
GRANITE_DEFAULTS = {
    **LLAMA_DEFAULTS,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), 1.0),
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = "only layers of attention are supported"

SCALED_FAMILY: dict[str, Architecture] = {
    "GraniteForCausalLM": Architecture(
        model_type="granite",
        base_classes=("GraniteModel",),
        weights=LLAMA_WEIGHTS,
        defaults=GRANITE_DEFAULTS,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        attention_multiplier="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    # Granite 4 in its dense sizes: no layer is of Mamba, and of a mixture there is but the shared expert.
    "GraniteMoeHybridForCausalLM": Architecture(
        model_type="granitemoehybrid",
        base_classes=("GraniteMoeHybridModel",),
        weights=GRANITE_HYBRID_WEIGHTS,
        defaults={**GRANITE_DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024},
        keys={"intermediate_size": "shared_intermediate_size"},
        derived={
            "has_mamba": rules.has_mamba,
            "rotates": lambda config: config.raw("position_embedding_type") == "rope",
        },
        refused={"num_local_experts": "mixtures of experts of Granite 4 are not supported", "has_mamba": MAMBA},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        attention_multiplier="attention_multiplier",
        logits_divisor="logits_scaling",
        rope_layers=lambda config, num_layers: (config.boolean("rotates"),) * num_layers,
    ),
    "MiniCPMForCausalLM": Architecture(
        model_type="minicpm",
        base_classes=("MiniCPMModel",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "tie_word_embeddings": True,
            "scale_emb": 1.0,
            "scale_depth": 1.0,
            "dim_model_base": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        derived={
            "residual_multiplier": lambda config: (
                rules.positive(config, "scale_depth") / rules.positive(config, "num_hidden_layers") ** 0.5
            ),
            "logits_divisor": lambda config: (
                rules.positive(config, "hidden_size") / rules.positive(config, "dim_model_base")
            ),
        },
        refused={"num_experts": "mixtures of experts of MiniCPM are not supported"},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        embedding_multiplier="scale_emb",
        residual_multiplier="residual_multiplier",
        logits_divisor="logits_divisor",
    ),
}
