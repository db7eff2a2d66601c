"""Decoders with LayerNorms: GPT-2, StarCoder 1 and 2, OPT, StableLM, Nemotron, OLMo."""

from __future__ import annotations

from typing import Any

from tessera.engine.models.fields import Fields
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
STABLELM_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "q_norm": (LLAMA_LAYER + "self_attn.q_layernorm.norms.{h}",),
    "k_norm": (LLAMA_LAYER + "self_attn.k_layernorm.norms.{h}",),
}
NEMOTRON_WEIGHTS: WeightNames = {**LLAMA_WEIGHTS, "up": (LLAMA_LAYER + "mlp.up_proj",)}
OPT_LAYER = "layers.{i}."
OPT_WEIGHTS: WeightNames = {
    "embedding": ("embed_tokens",),
    "position_embedding": ("embed_positions",),
    "final_norm": ("final_layer_norm",),
    "lm_head": ("lm_head",),
    "attention_norm_before": (OPT_LAYER + "self_attn_layer_norm",),
    "qkv": tuple(OPT_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
    "out": (OPT_LAYER + "self_attn.out_proj",),
    "mlp_norm_before": (OPT_LAYER + "final_layer_norm",),
    "up": (OPT_LAYER + "fc1",),
    "down": (OPT_LAYER + "fc2",),
}
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
GPT2_DEFAULTS: dict[str, Any] = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
WITHOUT_ENCODER = {"add_cross_attention": "only decoders without an encoder are supported"}


def no_rope_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    return (False,) * num_layers


LAYERNORM_FAMILY: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(
        model_type="gpt2",
        base_classes=("GPT2Model",),
        weights=GPT2_WEIGHTS,
        prefixes=("transformer.", ""),
        defaults=GPT2_DEFAULTS,
        refused=WITHOUT_ENCODER,
        keys=GPT2_KEYS,
        norm="layernorm",
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        transposed=True,
        rope_layers=no_rope_layers,
        ignored=(r".*h\.\d+\.attn\.(masked_)?bias",),
    ),
    "GPTBigCodeForCausalLM": Architecture(
        model_type="gpt_bigcode",
        base_classes=("GPTBigCodeModel",),
        weights=GPT2_WEIGHTS,
        prefixes=("transformer.", ""),
        defaults={**GPT2_DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
        refused=WITHOUT_ENCODER,
        keys=GPT2_KEYS,
        derived={"num_key_value_heads": lambda config: 1 if config.boolean("multi_query") else config.raw("n_head")},
        norm="layernorm",
        gated=False,
        learned_positions=True,
        qkv_order=rules.by_kv_head,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope_layers=no_rope_layers,
        ignored=(r".*h\.\d+\.attn\.(masked_)?bias",),
    ),
    "OPTForCausalLM": Architecture(
        model_type="opt",
        base_classes=("OPTModel",),
        weights=OPT_WEIGHTS,
        prefixes=("model.decoder.", "decoder."),
        defaults={
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "enable_bias": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
        required={
            "do_layer_norm_before": lambda config: True,
            "layer_norm_elementwise_affine": lambda config: True,
            "word_embed_proj_dim": lambda config: config.raw("hidden_size"),
        },
        refused={"_remove_final_layer_norm": "only a norm before the head is supported"},
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_eps"},
        norm="layernorm",
        gated=False,
        learned_positions=True,
        skipped_positions=2,
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_bias="enable_bias",
        rope_layers=no_rope_layers,
    ),
    "NemotronForCausalLM": Architecture(
        model_type="nemotron",
        base_classes=("NemotronModel",),
        weights=NEMOTRON_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        aliases={"rope_percent": "partial_rotary_factor"},
        keys={"rms_norm_eps": "norm_eps"},
        norm="layernorm",
        norm_offset=True,
        gated=False,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "OlmoForCausalLM": Architecture(
        model_type="olmo",
        base_classes=("OlmoModel",),
        weights=LLAMA_WEIGHTS,
        defaults={**LLAMA_DEFAULTS, "layer_norm_eps": 1e-5, "eos_token_id": 50279},
        keys={"rms_norm_eps": "layer_norm_eps"},
        refused={"clip_qkv": "queries, keys and values are not clipped"},
        norm="layernorm",
        norm_bias=False,
        norm_weights=False,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
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
        weights=STABLELM_WEIGHTS,
        other_weights={name: LLAMA_WEIGHTS[name] for name in ("q_norm", "k_norm")},
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        norm="layernorm",
        qk_norm="qk_layernorm",
        qk_norm_form="each_head",
        qkv_bias="use_qkv_bias",
        parallel="use_parallel_residual",
    ),
}
