"""The tensors of tiny models, by the names that their architectures' checkpoints have. Needs NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

VOCAB_SIZE = 128


def round_to_bfloat16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


class Random:
    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)  # its stream is frozen, unlike Generator's

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> Array:
        return round_to_bfloat16(self._state.standard_normal(shape) * std + mean)

    def bytes(self, count: int) -> Array:
        return self._state.randint(0, 256, count).astype(np.uint8)

    def norm(self, size: int, mean: float = 1.0) -> Array:
        return self.normal(size, std=0.25, mean=mean)


def llama_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    hidden, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention_bias = config.get("attention_bias", False)
    tensors = [
        ("model.embed_tokens.weight", random.normal(VOCAB_SIZE, hidden, std=0.7)),
        ("model.norm.weight", random.norm(hidden)),
    ]
    if not config["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", random.normal(VOCAB_SIZE, hidden, std=0.2)))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        parts = {name: random.normal(size, hidden, std=0.1 if name == "v" else 0.13) for name, size in rows.items()}
        gate, up = (random.normal(inner, hidden, std=0.12) for _ in range(2))
        tensors += [
            (at + "input_layernorm.weight", random.norm(hidden)),
            (at + "post_attention_layernorm.weight", random.norm(hidden)),
            (at + "self_attn.o_proj.weight", random.normal(hidden, heads * head_dim, std=0.15)),
            (at + "mlp.down_proj.weight", random.normal(hidden, inner, std=0.12)),
        ]
        if kind == "phi3":
            tensors.append((at + "self_attn.qkv_proj.weight", np.concatenate(list(parts.values()))))
            tensors.append((at + "mlp.gate_up_proj.weight", np.concatenate([gate, up])))
        else:
            tensors += [(at + f"self_attn.{name}_proj.weight", part) for name, part in parts.items()]
            tensors += [(at + "mlp.gate_proj.weight", gate), (at + "mlp.up_proj.weight", up)]
        if kind == "qwen2" or attention_bias:
            tensors += [(at + f"self_attn.{name}_proj.bias", random.normal(rows[name], std=0.5)) for name in rows]
        if attention_bias:
            tensors.append((at + "self_attn.o_proj.bias", random.normal(hidden, std=0.3)))
        if config.get("mlp_bias"):
            tensors += [(at + f"mlp.{name}_proj.bias", random.normal(inner, std=0.3)) for name in ("gate", "up")]
            tensors.append((at + "mlp.down_proj.bias", random.normal(hidden, std=0.3)))
        if kind == "qwen3":
            tensors += [(at + f"self_attn.{name}_norm.weight", random.norm(head_dim, mean=1.3)) for name in "qk"]
    return tensors


def gpt2_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    hidden, inner = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    tensors = [
        ("wte.weight", random.normal(VOCAB_SIZE, hidden, std=0.5)),
        ("wpe.weight", random.normal(config["n_positions"], hidden, std=0.5)),
        ("ln_f.weight", random.norm(hidden)),
        ("ln_f.bias", random.normal(hidden, std=0.3)),
    ]
    if not config["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", random.normal(VOCAB_SIZE, hidden, std=0.2)))
    for layer in range(config["n_layer"]):
        at = f"h.{layer}."
        qk, v = random.normal(hidden, 2 * hidden, std=0.15), random.normal(hidden, hidden, std=0.1)
        tensors += [
            (at + "attn.c_attn.weight", np.concatenate([qk, v], axis=1)),
            (at + "attn.c_attn.bias", random.normal(3 * hidden, std=0.3)),
            (at + "attn.c_proj.weight", random.normal(hidden, hidden, std=0.15)),
            (at + "attn.c_proj.bias", random.normal(hidden, std=0.3)),
            (at + "mlp.c_fc.weight", random.normal(hidden, inner, std=0.15)),
            (at + "mlp.c_fc.bias", random.normal(inner, std=0.3)),
            (at + "mlp.c_proj.weight", random.normal(inner, hidden, std=0.1)),
            (at + "mlp.c_proj.bias", random.normal(hidden, std=0.3)),
        ]
        for norm in ("ln_1", "ln_2"):
            tensors.append((at + norm + ".weight", random.norm(hidden)))
            tensors.append((at + norm + ".bias", random.normal(hidden, std=0.3)))
    return tensors


def starcoder2_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    """LayerNorms, biases everywhere, and an MLP without a gate."""
    named = {"up_proj": "c_fc", "down_proj": "c_proj"}
    tensors = []
    for name, tensor in llama_tensors(config, random):
        for old, new in named.items():
            name = name.replace(old, new)
        if "gate_proj" in name:
            continue
        tensors.append((name, tensor))
        if "norm" in name or (config["use_bias"] and "layers" in name):
            tensors.append((bias_of(name), random.normal(len(tensor), std=0.3)))
    return tensors


def stablelm_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    """LayerNorms, of which a parallel layer has one."""
    tensors = []
    for name, tensor in llama_tensors(config, random):
        if config["use_parallel_residual"] and "post_attention_layernorm" in name:
            continue
        tensors.append((name, tensor))
        has_bias = config["use_qkv_bias"] and any(f"{part}_proj" in name for part in "qkv")
        if has_bias or "norm" in name:
            tensors.append((bias_of(name), random.normal(len(tensor), std=0.3)))
    return tensors


def seed_oss_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    """A bias of the output projection by a switch of its own."""
    tensors = llama_tensors(config, random)
    return [pair for pair in tensors if config["attention_out_bias"] or not pair[0].endswith("o_proj.bias")]


def exaone4_tensors(config: dict[str, Any], random: Random) -> list[tuple[str, Array]]:
    """Norms after the halves and of heads."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    tensors = []
    for name, tensor in llama_tensors(config, random):
        if "input_layernorm" in name:
            tensors.append((name.replace("input_layernorm", "post_feedforward_layernorm"), tensor))
            names = (name.replace("input_layernorm", f"self_attn.{part}_norm") for part in "qk")
            tensors += [(each, random.norm(head_dim, mean=1.3)) for each in names]
        else:
            tensors.append((name, tensor))
    return tensors


def bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


MAKERS = {
    "gpt2": gpt2_tensors,
    "starcoder2": starcoder2_tensors,
    "stablelm": stablelm_tensors,
    "seed_oss": seed_oss_tensors,
    "exaone4": exaone4_tensors,
}
