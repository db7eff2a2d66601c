"""Decoders with LayerNorms: GPT-2, StarCoder2, StableLM."""

from __future__ import annotations

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, WeightNames
from tessera.engine.models.registry.llama import LLAMA_DEFAULTS, LLAMA_LAYER, LLAMA_WEIGHTS

GPT2_WEIGHTS: WeightNames = {
    "embedding": ("wte",),
    "position_embedding": ("wpe",),
    "final_norm": ("ln_f",),
    "lm_head": ("lm_head",),
    "attention_norm_before": ("h.{i}.ln_1",),
    "qkv": ("h.{i}.attn.c_attn",),
    "out": ("h.{i}.attn.c_proj",),
    "mlp_norm_before": ("h.{i}.ln_2",),
    "up": ("h.{i}.mlp.c_fc",),
    "down": ("h.{i}.mlp.c_proj",),
}
STARCODER2_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "up": (LLAMA_LAYER + "mlp.c_fc",),
    "down": (LLAMA_LAYER + "mlp.c_proj",),
}

LAYERNORM_FAMILY: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(
        model_type="gpt2",
        base_classes=("GPT2Model",),
        weights=GPT2_WEIGHTS,
        prefixes=("transformer.", ""),
        defaults={
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        refused={"add_cross_attention": "only decoders without an encoder are supported"},
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        norm="layernorm",
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        transposed=True,
        rope_layers=lambda config, num_layers: (False,) * num_layers,
        ignored=(r".*h\.\d+\.attn\.(masked_)?bias",),
    ),
    "Starcoder2ForCausalLM": Architecture(
        model_type="starcoder2",
        base_classes=("Starcoder2Model",),
        weights=STARCODER2_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        keys={"rms_norm_eps": "norm_epsilon"},
        norm="layernorm",
        gated=False,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        windows=rules.same_window,
    ),
    "StableLmForCausalLM": Architecture(
        model_type="stablelm",
        base_classes=("StableLmModel",),
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        refused={"qk_layernorm": "norms of each head with weights of its own are not supported"},
        norm="layernorm",
        qkv_bias="use_qkv_bias",
        parallel="use_parallel_residual",
    ),
}
