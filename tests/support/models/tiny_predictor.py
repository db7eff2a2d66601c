"""Tiny models with a layer of multi-token prediction, in the forms that checkpoints have it in, and what such a layer
drafts by its definition, in float64 NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tests.support.models.tiny_mixtures import TINY_MIXTURES, mixture_tensors
from tests.support.models.tiny_models import TINY_MODELS, write_safetensors
from tests.support.models.tiny_tensors import Random, llama_tensors

Array: TypeAlias = np.ndarray[Any, Any]
Tensors: TypeAlias = dict[str, Array]

MIMO = {
    **TINY_MODELS["qwen2-window"].config,
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "use_sliding_window": False,
    "num_hidden_layers": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {**config, "num_nextn_predict_layers": 1}
    for name, config in (
        ("mimo", MIMO),
        ("glm4moe-groups", TINY_MIXTURES["glm4moe-groups"]),
        ("ernie4_5-moe", TINY_MIXTURES["ernie4_5-moe"]),
    )
}
# Names of the layer's own modules: norm of embeddings, norm of hidden states, the matrix of both.
EXTRA = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj"),
    "glm4_moe": ("enorm", "hnorm", "eh_proj"),
    "ernie4_5_moe": ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
}


def write_model(folder: Path, name: str, **changed: Any) -> tuple[dict[str, Any], Tensors]:
    """A folder of the model; -> its config and all tensors."""
    config = {**CONFIGS[name], **changed}
    random, kind, count = Random(len(name)), config["model_type"], config["num_hidden_layers"]
    more = {**config, "num_hidden_layers": count + 1}
    if kind == "mimo":
        tensors = llama_tensors({**more, "model_type": "qwen2"}, random)
    elif kind == "glm4_moe":
        tensors = mixture_tensors(more, random)
    else:
        tensors = mixture_tensors(config, random)
        dense = llama_tensors({**config, "num_hidden_layers": 1, "model_type": "llama"}, random)
        tensors += [
            (each.replace("layers.0.", f"layers.{count}."), tensor) for each, tensor in dense if "layers.0." in each
        ]
    last, layer = f"model.layers.{count}.", {"mimo": "model.mtp_layers.0.", "ernie4_5_moe": "model.mtp_block.0."}
    at = layer.get(kind, last)
    found = {each.replace(last, at): tensor for each, tensor in tensors}
    hidden = config["hidden_size"]
    outer = "model." if kind == "ernie4_5_moe" else at
    token_norm, state_norm, join = EXTRA[kind]
    found[f"{outer}{token_norm}.weight"] = random.norm(hidden)
    found[f"{outer}{state_norm}.weight"] = random.norm(hidden)
    found[f"{outer}{join}.weight"] = random.normal(hidden, 2 * hidden, std=0.15)
    if kind == "mimo":
        found[f"{at}final_layernorm.weight"] = random.norm(hidden)
    if kind == "glm4_moe":
        found[f"{at}shared_head.norm.weight"] = random.norm(hidden)
        for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            found[f"{at}{copy}.weight"] = found[f"{original}.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", found)
    return config, found


class Reference:
    """The layer, from the model's tensors."""

    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        self._config = config
        self._weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._kind, count = config["model_type"], config["num_hidden_layers"]
        layers = {"mimo": "model.mtp_layers.0.", "ernie4_5_moe": "model.mtp_block.0."}
        self._at = layers.get(self._kind, f"model.layers.{count}.")

    def drafts(self, states: Array, text: list[int], count: int) -> list[int]:
        """`count` tokens that follow `text` [L]; states [L - 1, H] are what the model's last layer gave for all but the
        last token."""
        weights, kind = self._weights, self._kind
        inputs = list(states.astype(np.float64))
        if kind == "glm4_moe":
            inputs = [self._norm(each, "model.norm.weight") for each in inputs]
        finals = {"mimo": f"{self._at}final_layernorm", "glm4_moe": f"{self._at}shared_head.norm"}
        final = finals.get(kind, "model.norm")
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        tokens, found = list(text[1:]), list[int]()
        while len(found) < count:
            output = self._layer(self._joined(tokens, np.stack(inputs)))[-1]
            normed = self._norm(output, f"{final}.weight")
            found.append(int((head @ normed).argmax()))
            tokens.append(found[-1])
            inputs.append(output if kind == "ernie4_5_moe" else normed)
        return found

    def _joined(self, tokens: list[int], states: Array) -> Array:
        outer = "model." if self._kind == "ernie4_5_moe" else self._at
        token_norm, state_norm, join = (f"{outer}{name}.weight" for name in EXTRA[self._kind])
        embedded = self._norm(self._weights["model.embed_tokens.weight"][tokens], token_norm)
        states = self._norm(states, state_norm)
        halves = (states, embedded) if self._kind == "mimo" else (embedded, states)
        result: Array = np.concatenate(halves, axis=1) @ self._weights[join].T
        return result

    def _layer(self, x: Array) -> Array:
        at = self._at
        x = x + self._attention(self._norm(x, f"{at}input_layernorm.weight"))
        normed = self._norm(x, f"{at}post_attention_layernorm.weight")
        if self._kind != "glm4_moe":
            return x + self._mlp(normed, f"{at}mlp.")
        return x + np.stack([self._mixture(row) for row in normed])

    def _attention(self, x: Array) -> Array:
        config, length = self._config, len(x)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads

        def project(part: str) -> Array:
            product = x @ self._weights[f"{self._at}self_attn.{part}_proj.weight"].T
            product = product + self._weights.get(f"{self._at}self_attn.{part}_proj.bias", 0.0)
            result: Array = product.reshape(length, -1, head_dim).swapaxes(0, 1)
            norm = f"{self._at}self_attn.{part}_norm.weight"
            return self._norm(result, norm) if norm in self._weights else result

        q, k, v = self._rotate(project("q")), self._rotate(project("k")), project("v")
        k, v = (np.repeat(each, heads // kv_heads, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(head_dim)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        result: Array = (shares @ v).swapaxes(0, 1).reshape(length, -1)
        return result @ self._weights[f"{self._at}self_attn.o_proj.weight"].T

    def _rotate(self, x: Array) -> Array:
        """Of heads [N, T, D] at positions 0, 1, ...; ERNIE's pairs are neighbours, the others' are of two halves."""
        rotated = int(x.shape[-1] * self._config.get("partial_rotary_factor", 1.0))
        half = rotated // 2
        angles = np.arange(x.shape[1])[:, None] * self._config["rope_theta"] ** -(np.arange(half) / half)
        neighbours = self._kind == "ernie4_5_moe"
        first, second = x[..., :half], x[..., half:rotated]
        if neighbours:
            first, second = x[..., 0:rotated:2], x[..., 1:rotated:2]
        turned = (first + 1j * second) * np.exp(1j * angles)
        pairs = np.stack([turned.real, turned.imag], axis=-1 if neighbours else -2)
        return np.concatenate([pairs.reshape(*x.shape[:-1], rotated), x[..., rotated:]], axis=-1)

    def _mlp(self, x: Array, at: str) -> Array:
        gate, up, down = (self._weights[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = x @ gate.T
        result: Array = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
        return result

    def _mixture(self, x: Array) -> Array:
        """Of one token [H]: sigmoids, the best groups by their two best experts, the best experts in them."""
        config, at = self._config, f"{self._at}mlp."
        scores = 1 / (1 + np.exp(-(self._weights[f"{at}gate.weight"] @ x)))
        by = scores + self._weights[f"{at}gate.e_score_correction_bias"]
        groups = by.reshape(config.get("n_group", 1), -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: config.get("topk_group", 1)]
        allowed = np.full(groups.shape, -np.inf)
        allowed[best] = groups[best]
        chosen = np.argsort(-allowed.ravel())[: config["num_experts_per_tok"]]
        shares = scores[chosen] / (scores[chosen].sum() if config["norm_topk_prob"] else 1.0)
        shares *= config["routed_scaling_factor"]
        outputs = [self._mlp(x, f"{at}experts.{expert}.") for expert in chosen]
        result: Array = sum(share * output for share, output in zip(shares, outputs, strict=True))
        return result + self._mlp(x, f"{at}shared_experts.")

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"])
        result: Array = x / scale * self._weights[name]
        return result
