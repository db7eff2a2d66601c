"""Random configurations of the families beside Llama's, for `make_checkpoint_cases`. Needs nothing."""

from __future__ import annotations

import random
from typing import Any

# model_type -> class names of transformers without their ending.
CLASSES = {
    "arcee": "Arcee",
    "codegen": "CodeGen",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "ernie4_5": "Ernie4_5",
    "falcon": "Falcon",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt_bigcode": "GPTBigCode",
    "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ",
    "granitemoehybrid": "GraniteMoeHybrid",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "nemotron": "Nemotron",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "opt": "OPT",
    "phi": "Phi",
}
OWN_HEADS = ("arcee", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "nemotron", "olmo", "olmo2", "olmo3")
WINDOWED = ("gemma2", "gemma3_text", "cohere2", "olmo3")
BIASED = {*OWN_HEADS, "cohere", "cohere2", "gpt_neox", "granitemoehybrid", "helium", "hunyuan_v1_dense"}
ROTATED_SHARES = {"glm": (0.5, 1.0), "glm4": (0.5, 1.0), "gpt_neox": (0.25, 0.5, 1.0), "nemotron": (0.5, 1.0)}
ROTATED_SHARES["phi"] = (0.5, 1.0)
GELUS = ("gelu", "gelu_new", "gelu_fast")


def family_config(chooser: random.Random, family: str, vocab: int) -> dict[str, Any]:
    """Settings of a configuration class of transformers."""
    heads = chooser.choice([4, 8])
    head_dim = chooser.choice([8, 16])
    hidden, layers = heads * head_dim, chooser.choice([1, 2, 4])
    base: dict[str, Any] = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    base["tie_word_embeddings"] = family not in ("gptj", "codegen", "phi") and chooser.random() < 0.5
    if family in ("gptj", "codegen", "gpt_bigcode"):
        values = {**base, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 64}
        values |= {"n_inner": chooser.choice([None, 40]), "activation_function": chooser.choice(GELUS)}
        own = {"multi_query": chooser.random() < 0.5} if family == "gpt_bigcode" else {}
        return {**values, **(own or {"rotary_dim": chooser.choice([4, head_dim])})}
    values = {
        **base,
        "hidden_size": hidden,
        "intermediate_size": chooser.choice([40, 72]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": chooser.choice([1, 2, heads]),
        "max_position_embeddings": 64,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": chooser.choice([100.0, 10000.0])}
    if family in ROTATED_SHARES:
        rope["partial_rotary_factor"] = chooser.choice(ROTATED_SHARES[family])
    values["rope_parameters"] = rope
    if family in ("gemma3_text", "olmo3"):
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 500000.0}}
    if family in OWN_HEADS:
        values["head_dim"] = chooser.choice([8, 16, 32])
    elif family in ("ernie4_5", "helium", "hunyuan_v1_dense"):
        values["head_dim"] = head_dim
    if family in WINDOWED:
        values["sliding_window"] = chooser.choice([5, 20])
        values["layer_types"] = [chooser.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if family in BIASED:
        values["attention_bias"] = chooser.random() < 0.5
    values |= _own(chooser, family, hidden, heads, layers)
    if family in ("falcon", "gpt_neox", "opt"):
        del values["num_key_value_heads"]
    return values


def _own(chooser: random.Random, family: str, hidden: int, heads: int, layers: int) -> dict[str, Any]:
    def flip() -> bool:
        return chooser.random() < 0.5

    if family in ("gemma2", "gemma3_text"):
        caps = {"attn_logit_softcapping": chooser.choice([None, 3.0])} if family == "gemma2" else {}
        return {**caps, "final_logit_softcapping": chooser.choice([None, 5.0]), "query_pre_attn_scalar": 12}
    if family in ("cohere", "cohere2"):
        return {"logit_scale": 0.5, **({"use_qk_norm": flip()} if family == "cohere" else {})}
    if family == "granitemoehybrid":
        return {
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": heads,
            "layer_types": ["full_attention"] * layers,
            "position_embedding_type": chooser.choice(["rope", None]),
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.2,
        }
    if family == "falcon":
        if flip():
            new = {"num_kv_heads": chooser.choice([1, 2, heads]), "num_ln_in_parallel_attn": chooser.choice([None, 1])}
            return {"new_decoder_architecture": True, "bias": flip(), **new}
        return {"multi_query": flip(), "parallel_attn": flip(), "bias": flip()}
    if family == "opt":
        return {
            "ffn_dim": 40,
            "word_embed_proj_dim": hidden,
            "activation_function": chooser.choice(["relu", "gelu"]),
            "enable_bias": flip(),
        }
    if family in ("arcee", "nemotron"):
        return {"mlp_bias": flip()}
    if family == "ernie4_5":
        return {"use_bias": flip()}
    if family == "gpt_neox":
        return {"use_parallel_residual": flip(), "hidden_act": chooser.choice(GELUS)}
    return {"hidden_act": chooser.choice(GELUS)} if family == "phi" else {}
