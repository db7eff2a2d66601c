"""A Llama's forward and the sampling adjustments in float64 NumPy, straight from their definitions.

Shares no code with the project: what a server reports is compared with this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def logits_after(config: dict[str, Any], tensors: dict[str, Array], token_ids: list[int]) -> Array:
    """Logits [V] for the token that follows `token_ids`."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    length, size = len(token_ids), config["hidden_size"] // heads
    angles = np.outer(np.arange(length), config["rope_theta"] ** (-np.arange(0, size, 2) / size))
    turn = np.exp(1j * angles)  # the pair (x_i, x_{i + size/2}) is one complex number
    visible = np.tril(np.ones((length, length), bool))

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weights[name]

    def project(x: Array, name: str) -> Array:
        return x @ weights[name].T

    def rotate(x: Array) -> Array:
        turned = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def split(x: Array, count: int) -> Array:
        return x.reshape(length, count, size).swapaxes(0, 1)

    hidden = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        x = norm(hidden, at + "input_layernorm.weight")
        query = rotate(split(project(x, at + "self_attn.q_proj.weight"), heads))
        key = rotate(split(project(x, at + "self_attn.k_proj.weight"), kv_heads)).repeat(heads // kv_heads, axis=0)
        value = split(project(x, at + "self_attn.v_proj.weight"), kv_heads).repeat(heads // kv_heads, axis=0)
        scores = np.where(visible, query @ key.swapaxes(1, 2) / np.sqrt(size), -np.inf)
        mixed = (np.exp(log_softmax(scores)) @ value).swapaxes(0, 1).reshape(length, -1)
        hidden = hidden + project(mixed, at + "self_attn.o_proj.weight")
        x = norm(hidden, at + "post_attention_layernorm.weight")
        gate, up = project(x, at + "mlp.gate_proj.weight"), project(x, at + "mlp.up_proj.weight")
        hidden = hidden + project(gate / (1 + np.exp(-gate)) * up, at + "mlp.down_proj.weight")
    return project(norm(hidden[-1], "model.norm.weight"), "lm_head.weight")


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def penalised(
    logits: Array, prompt: list[int], output: list[int], *, repetition: float, presence: float, frequency: float
) -> Array:
    """Repetition over prompt and output (Keskar et al. 2019), presence and frequency over the output (OpenAI)."""
    logits = logits.copy()
    seen = np.unique([*prompt, *output])
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    counts = np.bincount(np.array(output, np.int64), minlength=len(logits))
    return logits - frequency * counts - presence * (counts > 0)
