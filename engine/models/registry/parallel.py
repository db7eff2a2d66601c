"""Decoders whose attention and MLP both see a layer's input: Cohere, Phi, GPT-NeoX, GPT-J, Falcon, CodeGen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, WeightNames
from tessera.engine.models.registry.layernorm import GPT2_DEFAULTS, GPT2_KEYS
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS

PHI_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "final_norm": ("model.final_layernorm",),
    "out": (LLAMA_LAYER + "self_attn.dense",),
    "up": (LLAMA_LAYER + "mlp.fc1",),
    "down": (LLAMA_LAYER + "mlp.fc2",),
}
NEOX_LAYER = "layers.{i}."
NEOX_WEIGHTS: WeightNames = {
    "embedding": ("embed_in",),
    "final_norm": ("final_layer_norm",),
    "lm_head": ("embed_out",),
    "attention_norm_before": (NEOX_LAYER + "input_layernorm",),
    "qkv": (NEOX_LAYER + "attention.query_key_value",),
    "out": (NEOX_LAYER + "attention.dense",),
    "mlp_norm_before": (NEOX_LAYER + "post_attention_layernorm",),
    "up": (NEOX_LAYER + "mlp.dense_h_to_4h",),
    "down": (NEOX_LAYER + "mlp.dense_4h_to_h",),
}
GPTJ_LAYER = "h.{i}."
GPTJ_WEIGHTS: WeightNames = {
    "embedding": ("wte",),
    "final_norm": ("ln_f",),
    "lm_head": ("lm_head",),
    "attention_norm_before": (GPTJ_LAYER + "ln_1",),
    "qkv": tuple(GPTJ_LAYER + f"attn.{part}_proj" for part in "qkv"),
    "out": (GPTJ_LAYER + "attn.out_proj",),
    "up": (GPTJ_LAYER + "mlp.fc_in",),
    "down": (GPTJ_LAYER + "mlp.fc_out",),
}
FALCON_WEIGHTS: WeightNames = {
    "embedding": ("word_embeddings",),
    "final_norm": ("ln_f",),
    "lm_head": ("lm_head",),
    "attention_norm_before": (GPTJ_LAYER + "input_layernorm",),
    "qkv": (GPTJ_LAYER + "self_attention.query_key_value",),
    "out": (GPTJ_LAYER + "self_attention.dense",),
    "mlp_norm_before": (GPTJ_LAYER + "post_attention_layernorm",),
    "up": (GPTJ_LAYER + "mlp.dense_h_to_4h",),
    "down": (GPTJ_LAYER + "mlp.dense_4h_to_h",),
}
GPTJ_DEFAULTS: dict[str, Any] = {
    **GPT2_DEFAULTS,
    "n_positions": 2048,
    "rotary_dim": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GPTJ_DERIVED: dict[str, Any] = {
    "n_inner": lambda config: 4 * config.integer("n_embd", 1, 2**17),
    "partial_rotary_factor": rules.rotary_share,
}
COHERE_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "use_qk_norm": False,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
MASKS = (r".*\.attn\.(masked_)?bias", r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq", r".*causal_mask")

GPTJ = Architecture(
    model_type="gptj",
    base_classes=("GPTJModel",),
    weights=GPTJ_WEIGHTS,
    prefixes=("transformer.", ""),
    defaults=GPTJ_DEFAULTS,
    keys=GPT2_KEYS,
    derived=GPTJ_DERIVED,
    norm="layernorm",
    gated=False,
    rope_interleaved=True,
    mlp_bias=True,
    head_bias=True,
    parallel=True,
    ignored=MASKS,
)

PARALLEL_FAMILY: dict[str, Architecture] = {
    "CohereForCausalLM": Architecture(
        model_type="cohere",
        base_classes=("CohereModel",),
        weights=LLAMA_WEIGHTS,
        defaults={**COHERE_DEFAULTS, "rope_theta": 500000.0},
        keys={"rms_norm_eps": "layer_norm_eps", "max_position_embeddings": "context_length"},
        # Command R says 8192 positions beside the length of its context, 131072; Aya has no such key.
        derived={
            "logits_divisor": lambda config: 1 / rules.positive(config, "logit_scale"),
            "context_length": lambda config: config.raw("model_max_length") or config.raw("max_position_embeddings"),
        },
        norm="layernorm",
        norm_bias=False,
        qk_norm="use_qk_norm",
        qk_norm_form="each_head",
        rope_interleaved=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        parallel=True,
        logits_divisor="logits_divisor",
    ),
    "Cohere2ForCausalLM": Architecture(
        model_type="cohere2",
        base_classes=("Cohere2Model",),
        weights=LLAMA_WEIGHTS,
        defaults={**COHERE_DEFAULTS, "sliding_window_pattern": 4},
        defaults_if_absent={"sliding_window": 4096},
        keys={"rms_norm_eps": "layer_norm_eps"},
        derived={"logits_divisor": lambda config: 1 / rules.positive(config, "logit_scale")},
        norm="layernorm",
        norm_bias=False,
        rope_interleaved=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        parallel=True,
        logits_divisor="logits_divisor",
        rope_layers=rules.windowed_rope_layers,
        windows=rules.patterned_windows,
    ),
    "PhiForCausalLM": Architecture(
        model_type="phi",
        base_classes=("PhiModel",),
        weights=PHI_WEIGHTS,
        other_weights={"qkv": (LLAMA_LAYER + "self_attn.qkv_proj",)},
        defaults={
            **LLAMA_DEFAULTS,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        refused={"qk_layernorm": "norms of queries and keys with biases are not supported"},
        norm="layernorm",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        parallel=True,
    ),
    "GPTNeoXForCausalLM": Architecture(
        model_type="gpt_neox",
        base_classes=("GPTNeoXModel",),
        weights=NEOX_WEIGHTS,
        prefixes=("gpt_neox.", ""),
        defaults={
            **LLAMA_DEFAULTS,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        keys={"rms_norm_eps": "layer_norm_eps"},
        norm="layernorm",
        gated=False,
        qkv_order=rules.by_kv_head,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias=True,
        parallel="use_parallel_residual",
        parallel_norms=True,
        ignored=MASKS,
    ),
    "GPTJForCausalLM": GPTJ,
    "CodeGenForCausalLM": replace(
        GPTJ,
        model_type="codegen",
        base_classes=("CodeGenModel",),
        weights={**GPTJ_WEIGHTS, "qkv": (GPTJ_LAYER + "attn.qkv_proj",)},
        required={"n_head": lambda config: max(config.integer("n_head", 1, 2**20) // 4 * 4, 4)},
        qkv_order=rules.codegen_order,
    ),
    "FalconForCausalLM": Architecture(
        model_type="falcon",
        base_classes=("FalconModel", "RWForCausalLM"),
        weights=FALCON_WEIGHTS,
        # With a norm for each half they are called otherwise.
        other_weights={
            "attention_norm_before": (GPTJ_LAYER + "ln_attn",),
            "mlp_norm_before": (GPTJ_LAYER + "ln_mlp",),
        },
        prefixes=("transformer.", ""),
        defaults={
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "bos_token_id": 11,
            "eos_token_id": 11,
        },
        aliases={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
        },
        keys={
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        derived={
            "ffn_hidden_size": lambda config: 4 * config.integer("hidden_size", 1, 2**17),
            "num_key_value_heads": rules.falcon_kv_heads,
            "parallel": lambda config: config.boolean("new_decoder_architecture") or config.boolean("parallel_attn"),
            "parallel_norms": rules.falcon_parallel_norms,
        },
        refused={"alibi": "only rotary position embeddings are supported"},
        norm="layernorm",
        gated=False,
        qkv_order=rules.by_kv_head,
        qkv_bias="bias",
        out_bias="bias",
        mlp_bias="bias",
        parallel="parallel",
        parallel_norms="parallel_norms",
        ignored=MASKS,
    ),
}
