"""Gemma: norms that are stored as what they differ from 1 by, scaled embeddings, soft caps."""

from __future__ import annotations

import math
from typing import Any

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, RopeKeys, WeightNames
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS

GEMMA2_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "attention_norm_after": (LLAMA_LAYER + "post_attention_layernorm",),
    "mlp_norm_before": (LLAMA_LAYER + "pre_feedforward_layernorm",),
    "mlp_norm_after": (LLAMA_LAYER + "post_feedforward_layernorm",),
}
GEMMA_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
SCALED_EMBEDDING: dict[str, Any] = {
    "embedding_multiplier": lambda config: math.sqrt(config.integer("hidden_size", 1, 2**17)),
}
DERIVED: dict[str, Any] = {
    **SCALED_EMBEDDING,
    "attention_multiplier": lambda config: config.number("query_pre_attn_scalar", 1e-6, 1e6) ** -0.5,
}
BIDIRECTIONAL = {"use_bidirectional_attention": "only causal attention is supported"}

GEMMA_FAMILY: dict[str, Architecture] = {
    "GemmaForCausalLM": Architecture(
        model_type="gemma",
        base_classes=("GemmaModel",),
        weights=LLAMA_WEIGHTS,
        defaults={**GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
        keys={"hidden_act": "gemma_act"},
        # Its first files say `gelu` and mean the approximation.
        derived={**SCALED_EMBEDDING, "gemma_act": rules.tanh_gelu},
        refused=BIDIRECTIONAL,
        norm_offset=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        embedding_multiplier="embedding_multiplier",
        embedding_rounded=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        model_type="gemma2",
        base_classes=("Gemma2Model",),
        weights=GEMMA2_WEIGHTS,
        defaults={
            **GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 2,
        },
        defaults_if_absent={
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        keys={"hidden_act": "hidden_activation"},
        derived=DERIVED,
        refused=BIDIRECTIONAL,
        norm_offset=True,
        norm_places=("before", "after"),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        embedding_multiplier="embedding_multiplier",
        embedding_rounded=True,
        attention_multiplier="attention_multiplier",
        attention_soft_cap="attn_logit_softcapping",
        logits_soft_cap="final_logit_softcapping",
        windows=rules.patterned_windows,
    ),
    "Gemma3ForCausalLM": Architecture(
        model_type="gemma3_text",
        base_classes=("Gemma3TextModel",),
        weights=GEMMA2_WEIGHTS,
        defaults={
            **GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
        },
        defaults_if_absent={"sliding_window": 4096},
        keys={"hidden_act": "hidden_activation"},
        derived=DERIVED,
        refused=BIDIRECTIONAL,
        norm_offset=True,
        norm_places=("before", "after"),
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        embedding_multiplier="embedding_multiplier",
        embedding_rounded=True,
        attention_multiplier="attention_multiplier",
        attention_soft_cap="attn_logit_softcapping",
        logits_soft_cap="final_logit_softcapping",
        window_rope=(
            RopeKeys("full_attention", "rope_theta"),
            RopeKeys("sliding_attention", "rope_local_base_freq", scaled=False),
        ),
        windows=rules.patterned_windows,
    ),
}
