"""GGUF's mixtures of experts: names, and the keys that describe them."""

from __future__ import annotations

from typing import Any

from tessera.engine.models.gguf.architecture import LLAMA_NAMES, GGUFArchitecture, Names, of_layers
from tessera.engine.models.gguf.keys import ArchitectureKeys
from tessera.engine.models.registry.experts import ExpertForm

EXPERTS = "model.layers.{i}.mlp.experts."


def _stacked(*parts: str, kind: str = "weight") -> tuple[str, ...]:
    return tuple(f"{EXPERTS}{part}_exps.{kind}" for part in parts)


# All experts of a layer are one tensor each of gate, up and down.
GGUF_EXPERTS = ExpertForm(
    _stacked("gate", "up"),
    _stacked("down"),
    up_bias=_stacked("gate", "up", kind="bias"),
    down_bias=_stacked("down", kind="bias"),
)


def _mixture(router: str, names: Names) -> Names:
    """Those of Llama, with `router` within a layer and further names there."""
    found = {f"ffn_{part}_exps": f"mlp.experts.{part}_exps" for part in ("gate", "up", "down")}
    return {**LLAMA_NAMES, **of_layers("model.layers.{i}.", {"ffn_gate_inp": router, **found, **names})}


def _shared(module: str) -> Names:
    return {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}


QWEN_NAMES = _mixture("mlp.gate", {**_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
SIGMOID_NAMES = _mixture(
    "mlp.gate",
    {
        **_shared("shared_experts"),
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "post_attention_norm": "post_attention_layernorm",
    },
)
ERNIE_NAMES = _mixture(
    "mlp.gate", {**_shared("shared_experts"), "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
)
GPT_OSS_NAMES = _mixture(
    "mlp.router", {"attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
)

GGUF_MIXTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("MixtralForCausalLM", "mixtral", _mixture("block_sparse_moe.gate", {}), interleaved=True),
    "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", QWEN_NAMES),
    "qwen3moe": GGUFArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_NAMES, norm_topk_prob=True),
    "qwen3vlmoe": GGUFArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_NAMES, norm_topk_prob=True),
    "granitemoe": GGUFArchitecture(
        "GraniteMoeForCausalLM", "granitemoe", _mixture("block_sparse_moe.router.layer", {}), interleaved=True
    ),
    "phimoe": GGUFArchitecture("PhimoeForCausalLM", "phimoe", _mixture("block_sparse_moe.gate", {})),
    "olmoe": GGUFArchitecture("OlmoeForCausalLM", "olmoe", QWEN_NAMES),
    "glm4moe": GGUFArchitecture("Glm4MoeForCausalLM", "glm4_moe", SIGMOID_NAMES),
    "dots1": GGUFArchitecture("Dots1ForCausalLM", "dots1", SIGMOID_NAMES),
    "ernie4_5-moe": GGUFArchitecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ERNIE_NAMES),
    "gpt-oss": GGUFArchitecture("GptOssForCausalLM", "gpt_oss", GPT_OSS_NAMES),
}


def num_layers(keys: ArchitectureKeys) -> int:
    """Without those at the end that predict further tokens."""
    return keys.integer("block_count") - keys.integer("nextn_predict_layers", 0)


def expert_keys(keys: ArchitectureKeys, architecture: GGUFArchitecture) -> dict[str, Any]:
    """What config.json says of mixtures, under all names that architectures have for it; nothing without them."""
    count = keys.integer("expert_count", 0)
    if not count:
        return {}
    dense = keys.integer("feed_forward_length", 0) or None
    inner = keys.integer("expert_feed_forward_length", dense or 0)
    shared, first = keys.integer("expert_shared_count", 0), keys.integer("leading_dense_block_count", 0)
    found: dict[str, Any] = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": dense,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0) or None,
        "n_shared_experts": shared,
        "moe_num_shared_experts": shared,
        "first_k_dense_replace": first,
        "moe_layer_start_index": first,
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        "n_group": keys.integer("expert_group_count", 1) or 1,
        "topk_group": keys.integer("expert_group_used_count", 1) or 1,
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0, 1e6, 1.0) or 1.0,
        "norm_topk_prob": keys.boolean("expert_weights_norm"),
    }
    if found["norm_topk_prob"] is None:
        found["norm_topk_prob"] = architecture.norm_topk_prob
    if architecture.model_type in ("mixtral", "granitemoe", "phimoe", "olmoe", "gpt_oss"):
        found["intermediate_size"] = inner  # as there config.json calls the size of an expert
    return found
