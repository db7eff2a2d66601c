"""Tiny mixtures of experts: their configurations, and their tensors as checkpoints have them. Needs NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.models.tiny_tensors import Array, Random, bias_of, llama_tensors

NUM_EXPERTS = 8
EXPERT_SIZE = 32


def _config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **changes,
    }


def _local(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    """Whose experts have the size of the MLP."""
    settings = {"num_local_experts": NUM_EXPERTS, "intermediate_size": EXPERT_SIZE, **changes}
    return _config(architecture, model_type, **settings)


def _qwen(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    settings = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": EXPERT_SIZE, "norm_topk_prob": True, **changes}
    return _config(architecture, model_type, **settings)


def _qwen2(**changes: Any) -> dict[str, Any]:
    return _qwen("Qwen2MoeForCausalLM", "qwen2_moe", shared_expert_intermediate_size=48, **changes)


def _qwen3(**changes: Any) -> dict[str, Any]:
    return _qwen("Qwen3MoeForCausalLM", "qwen3_moe", **changes)


def _granite(**changes: Any) -> dict[str, Any]:
    settings = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.5,
    }
    return _local("GraniteMoeForCausalLM", "granitemoe", **{**settings, **changes})


def _phimoe(**changes: Any) -> dict[str, Any]:
    settings = {"attention_bias": True, "lm_head_bias": True, "sliding_window": None, "router_jitter_noise": 0.01}
    return _local("PhimoeForCausalLM", "phimoe", **{**settings, **changes})


def _glm4(**changes: Any) -> dict[str, Any]:
    settings = {
        "n_routed_experts": NUM_EXPERTS,
        "moe_intermediate_size": EXPERT_SIZE,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "head_dim": 16,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
    }
    return _config("Glm4MoeForCausalLM", "glm4_moe", **{**settings, **changes})


def _gpt_oss(**changes: Any) -> dict[str, Any]:
    settings = {
        "head_dim": 16,
        "sliding_window": 8,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        "rope_theta": 500.0,
    }
    return _local("GptOssForCausalLM", "gpt_oss", **{**settings, **changes})


def _olmoe(**changes: Any) -> dict[str, Any]:
    settings = {"num_experts": NUM_EXPERTS, "intermediate_size": EXPERT_SIZE, "norm_topk_prob": False}
    return _config("OlmoeForCausalLM", "olmoe", **{**settings, **changes})


def _dots1(**changes: Any) -> dict[str, Any]:
    settings = {
        "n_routed_experts": NUM_EXPERTS,
        "moe_intermediate_size": EXPERT_SIZE,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
    }
    return _config("Dots1ForCausalLM", "dots1", **{**settings, **changes})


def _ernie(**changes: Any) -> dict[str, Any]:
    settings = {
        "moe_num_experts": NUM_EXPERTS,
        "moe_intermediate_size": EXPERT_SIZE,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "num_hidden_layers": 3,
        "use_bias": False,
    }
    found = _config("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", **{**settings, **changes})
    del found["num_experts_per_tok"]
    return found


PHIMOE_ROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}

TINY_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _local("MixtralForCausalLM", "mixtral"),
    "mixtral-window": _local("MixtralForCausalLM", "mixtral", sliding_window=8, num_experts_per_tok=3, head_dim=32),
    "qwen2moe": _qwen2(norm_topk_prob=False),
    "qwen2moe-sparse": _qwen2(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], num_experts_per_tok=4),
    "qwen3moe": _qwen3(head_dim=32),
    "qwen3moe-dense": _qwen3(head_dim=16, norm_topk_prob=False, mlp_only_layers=[0], attention_bias=True),
    "granitemoe": _granite(),
    "granitemoe-tied": _granite(tie_word_embeddings=True, num_experts_per_tok=4, residual_multiplier=1.0),
    "phimoe": _phimoe(),
    "phimoe-longrope": _phimoe(
        attention_bias=False,
        lm_head_bias=False,
        max_position_embeddings=256,
        router_jitter_noise=0.2,
        rope_scaling=PHIMOE_ROPE,
    ),
    "glm4moe": _glm4(),
    "glm4moe-groups": _glm4(
        n_group=4, topk_group=2, use_qk_norm=True, attention_bias=False, n_shared_experts=2, norm_topk_prob=False
    ),
    "olmoe": _olmoe(),
    "olmoe-normalised": _olmoe(norm_topk_prob=True, attention_bias=True, num_key_value_heads=4, num_experts_per_tok=4),
    "dots1": _dots1(),
    "dots1-window": _dots1(sliding_window=8, max_window_layers=1, attention_bias=True, n_group=2, topk_group=1),
    "ernie4_5-moe": _ernie(),
    "ernie4_5-moe-sparse": _ernie(
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        num_hidden_layers=4,
        head_dim=32,
        tie_word_embeddings=True,
        moe_num_shared_experts=1,
    ),
    "gptoss": _gpt_oss(),
    "gptoss-mxfp4": _gpt_oss(quantization_config=MXFP4, num_experts_per_tok=4),
}


def mixture_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    """By the names that published checkpoints have."""
    kind = config["model_type"]
    tensors: list[tuple[str, Array]] = []
    for name, tensor in llama_tensors({**config, "model_type": LIKE.get(kind, "llama")}, random):
        if ".mlp." in name and is_mixture(config, int(name.split(".")[2])):
            continue
        if kind == "glm4_moe" and name.endswith("o_proj.bias"):
            continue
        tensors.append((name, tensor))
        if kind == "phimoe" and "norm" in name:
            tensors.append((bias_of(name), random.normal(len(tensor), std=0.3)))
    if config.get("lm_head_bias"):
        tensors.append(("lm_head.bias", random.normal(config["vocab_size"], std=0.3)))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        if kind == "olmoe":
            sizes = (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"]))
            heads = config["hidden_size"] // config["num_attention_heads"]
            tensors += [(at + f"self_attn.{part}_norm.weight", random.norm(count * heads)) for part, count in sizes]
        if config.get("use_qk_norm") or kind == "dots1":
            tensors += [(at + f"self_attn.{part}_norm.weight", random.norm(config["head_dim"])) for part in "qk"]
        if kind == "gpt_oss":
            tensors.append((at + "self_attn.sinks", random.normal(config["num_attention_heads"], std=2.0)))
        if is_mixture(config, layer):
            tensors += MAKERS_OF_EXPERTS[kind](config, at, random)
    return tensors


# Whose attention an architecture has.
LIKE = {"qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}


def is_mixture(config: dict[str, Any], layer: int) -> bool:
    dense_first = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0))
    step = config.get("decoder_sparse_step", config.get("moe_layer_interval", 1))
    last = config.get("moe_layer_end_index", layer)
    return (
        layer <= last
        and layer >= dense_first
        and (layer + 1) % step == 0
        and layer not in config.get("mlp_only_layers", [])
    )


def _mlp(at: str, names: tuple[str, str, str], hidden: int, inner: int, random: Random) -> list[tuple[str, Array]]:
    gate, up, down = names
    return [
        (f"{at}{gate}.weight", random.normal(inner, hidden, std=0.15)),
        (f"{at}{up}.weight", random.normal(inner, hidden, std=0.15)),
        (f"{at}{down}.weight", random.normal(hidden, inner, std=0.2)),
    ]


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _mixtral(config: dict[str, Any], at: str, random: Random) -> list[tuple[str, Array]]:
    hidden = config["hidden_size"]
    at += "block_sparse_moe."
    tensors = [(at + "gate.weight", random.normal(NUM_EXPERTS, hidden, std=0.3))]
    for expert in range(NUM_EXPERTS):
        tensors += _mlp(f"{at}experts.{expert}.", ("w1", "w3", "w2"), hidden, EXPERT_SIZE, random)
    return tensors


def _qwen_or_glm(config: dict[str, Any], at: str, random: Random) -> list[tuple[str, Array]]:
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    at += "mlp."
    tensors = [(at + "gate.weight", random.normal(NUM_EXPERTS, hidden, std=0.3))]
    if config["model_type"] == "ernie4_5_moe":
        tensors.append((at + "moe_statics.e_score_correction_bias", random.normal(1, NUM_EXPERTS, std=0.2)))
        size = config["moe_num_shared_experts"] * inner
        tensors += _mlp(at + "shared_experts.", PROJECTIONS, hidden, size, random)
    if config["model_type"] in ("glm4_moe", "dots1"):
        tensors.append((at + "gate.e_score_correction_bias", random.normal(NUM_EXPERTS, std=0.2)))
        tensors += _mlp(at + "shared_experts.", PROJECTIONS, hidden, config["n_shared_experts"] * inner, random)
    if config["model_type"] == "qwen2_moe":
        size = config["shared_expert_intermediate_size"]
        tensors += _mlp(at + "shared_expert.", PROJECTIONS, hidden, size, random)
        tensors.append((at + "shared_expert_gate.weight", random.normal(1, hidden, std=0.3)))
    for expert in range(NUM_EXPERTS):
        tensors += _mlp(f"{at}experts.{expert}.", PROJECTIONS, hidden, inner, random)
    return tensors


def _granite_experts(config: dict[str, Any], at: str, random: Random) -> list[tuple[str, Array]]:
    hidden = config["hidden_size"]
    at += "block_sparse_moe."
    return [
        (at + "router.layer.weight", random.normal(NUM_EXPERTS, hidden, std=0.3)),
        (at + "input_linear.weight", random.normal(NUM_EXPERTS, 2 * EXPERT_SIZE, hidden, std=0.15)),
        (at + "output_linear.weight", random.normal(NUM_EXPERTS, hidden, EXPERT_SIZE, std=0.2)),
    ]


def _gpt_oss_experts(config: dict[str, Any], at: str, random: Random) -> list[tuple[str, Array]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    at += "mlp."
    experts = at + "experts."
    tensors = [
        (at + "router.weight", random.normal(NUM_EXPERTS, hidden, std=0.3)),
        (at + "router.bias", random.normal(NUM_EXPERTS, std=0.5)),
        (experts + "gate_up_proj_bias", random.normal(NUM_EXPERTS, 2 * inner, std=0.5)),
        (experts + "down_proj_bias", random.normal(NUM_EXPERTS, hidden, std=0.5)),
    ]
    sizes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
    for name, (columns, rows) in sizes.items():
        if "quantization_config" in config:
            blocks, scales = mxfp4(NUM_EXPERTS, rows, columns, random)
            tensors += [(f"{experts}{name}_blocks", blocks), (f"{experts}{name}_scales", scales)]
        else:
            # Large enough that the clamped SwiGLU clamps.
            tensors.append((experts + name, random.normal(NUM_EXPERTS, columns, rows, std=0.3)))
    return tensors


def mxfp4(experts: int, rows: int, columns: int, random: Random) -> tuple[Array, Array]:
    """Random blocks [experts, rows, columns / 32, 16] and scales [experts, rows, columns / 32]."""
    count = experts * rows * columns // 32
    blocks = random.bytes(count * 16).reshape(experts, rows, -1, 16)
    scales = 121 + random.bytes(count).reshape(experts, rows, -1) % 4
    return blocks, scales.astype(np.uint8)


MAKERS_OF_EXPERTS = {
    "mixtral": _mixtral,
    "phimoe": _mixtral,
    "qwen2_moe": _qwen_or_glm,
    "qwen3_moe": _qwen_or_glm,
    "glm4_moe": _qwen_or_glm,
    "olmoe": _qwen_or_glm,
    "dots1": _qwen_or_glm,
    "ernie4_5_moe": _qwen_or_glm,
    "granitemoe": _granite_experts,
    "gpt_oss": _gpt_oss_experts,
}
