"""Random configurations of mixtures of experts, for `make_checkpoint_cases`. Needs nothing."""

from __future__ import annotations

import random
from typing import Any

# model_type -> class names of transformers without their ending.
MIXTURES = {
    "dots1": "Dots1",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "granitemoe": "GraniteMoe",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "phimoe": "Phimoe",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}
LOCAL = ("mixtral", "phimoe", "granitemoe", "gpt_oss")
GROUPED = ("glm4_moe", "dots1")
OWN_HEADS = ("dots1", "gpt_oss", "glm4_moe", "mixtral", "qwen3_moe")


def mixture_config(chooser: random.Random, family: str, vocab: int) -> dict[str, Any]:
    """Settings of a configuration class of transformers."""
    heads, head_dim = chooser.choice([4, 8]), chooser.choice([8, 16])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": chooser.choice([100.0, 10000.0])}
    if family == "glm4_moe":
        rope["partial_rotary_factor"] = chooser.choice([0.5, 1.0])
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": chooser.random() < 0.5,
        "hidden_size": heads * head_dim,
        "intermediate_size": chooser.choice([24, 40]),
        "num_hidden_layers": chooser.choice([1, 2, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": chooser.choice([1, 2, heads]),
        "max_position_embeddings": 64,
        "rope_parameters": rope,
    }
    if family in OWN_HEADS:
        values["head_dim"] = chooser.choice([8, 16, 32])
    num_experts, top_k = chooser.choice([4, 8, 16]), chooser.choice([1, 2, 3])
    return values | _own(
        chooser, family, num_experts, 2 if family == "phimoe" else top_k, values["tie_word_embeddings"]
    )


def _own(chooser: random.Random, family: str, num_experts: int, top_k: int, tied: bool) -> dict[str, Any]:
    def flip() -> bool:
        return chooser.random() < 0.5

    inner = {"moe_intermediate_size": chooser.choice([24, 32])}
    if family in LOCAL:
        found: dict[str, Any] = {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
        if family == "mixtral":
            return {**found, "sliding_window": chooser.choice([None, 7])}
        if family == "phimoe":
            # A tied head has no bias here.
            found |= {"attention_bias": flip(), "lm_head_bias": not tied and flip()}
            return {**found, "router_jitter_noise": chooser.choice([0.01, 0.2])}
        if family == "gpt_oss":
            return {**found, "sliding_window": chooser.choice([5, 9])}
        scales = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
        return {**found, **scales, "attention_multiplier": 0.2, "attention_bias": flip()}
    if family in GROUPED:
        groups = chooser.choice([1, 2])
        chosen = groups if num_experts // groups < top_k else chooser.randint(1, groups)
        found = {"n_routed_experts": num_experts, "num_experts_per_tok": top_k, **inner, "norm_topk_prob": flip()}
        found |= {"n_shared_experts": chooser.choice([1, 2]), "n_group": groups, "topk_group": chosen}
        found |= {"first_k_dense_replace": chooser.choice([0, 1]), "routed_scaling_factor": chooser.choice([1.0, 2.5])}
        window = {"sliding_window": chooser.choice([None, 7]), "max_window_layers": chooser.choice([0, 1, 9])}
        return {**found, "attention_bias": flip(), **({"use_qk_norm": flip()} if family == "glm4_moe" else window)}
    if family == "ernie4_5_moe":
        found = {
            "moe_num_experts": num_experts,
            "moe_k": top_k,
            **inner,
            "moe_layer_start_index": chooser.choice([0, 1]),
        }
        return {**found, "moe_num_shared_experts": chooser.choice([1, 2]), "moe_layer_interval": chooser.choice([1, 2])}
    found = {"num_experts": num_experts, "num_experts_per_tok": top_k, "norm_topk_prob": flip()}
    if family == "olmoe":
        return {**found, "attention_bias": flip()}
    found |= {**inner, "decoder_sparse_step": chooser.choice([1, 2]), "mlp_only_layers": chooser.choice([[], [0]])}
    if family == "qwen2_moe":
        return {**found, "shared_expert_intermediate_size": chooser.choice([24, 48]), "qkv_bias": flip()}
    return {**found, "attention_bias": flip()}
