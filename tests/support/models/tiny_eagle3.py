"""EAGLE-3 heads with random weights for tiny models, and what such a head drafts by its definition, in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tests.support.models.tiny_models import write_safetensors

Array: TypeAlias = np.ndarray[Any, Any]

HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 4, 2, 32, 96, 1e-5, 10000.0


def write_head(folder: Path, hidden: int, vocab_size: int, num_tokens: int, **changed: Any) -> dict[str, Array]:
    """A folder whose head drafts `num_tokens` of the `vocab_size` tokens; -> its tensors."""
    random = np.random.default_rng(7)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "max_position_embeddings": 16,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab_size,
        "draft_vocab_size": num_tokens,
        "torch_dtype": "float16",
        **changed,
    }
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INNER, hidden),
        "midlayer.mlp.up_proj": (INNER, hidden),
        "midlayer.mlp.down_proj": (hidden, INNER),
        "lm_head": (num_tokens, hidden),
    }
    tensors = {
        f"{name}.weight": random.normal(0, shape[1] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = random.uniform(0.5, 1.5, hidden).astype(np.float32)
    tensors["norm.weight"] = random.uniform(0.5, 1.5, hidden).astype(np.float32)
    chosen = np.sort(random.choice(np.arange(3, vocab_size), num_tokens, replace=False))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    add_tensor(folder / "model.safetensors", "d2t", (chosen - np.arange(num_tokens)).astype(np.int64))
    return {**tensors, "tokens": chosen}


def write_as_speculators(head: Path, folder: Path, **changed: Any) -> None:
    """The head in `head` in the form of the speculators library."""
    config = json.loads((head / "config.json").read_text())
    num_tokens = config.pop("draft_vocab_size")
    values = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": num_tokens,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": {name: value for name, value in config.items() if name != "architectures"},
        **changed,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    data = (head / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps({name.replace("midlayer.", "layers.0."): entry for name, entry in header.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def add_tensor(path: Path, name: str, values: Array) -> None:
    """Put one of int64 behind the others."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    offsets = [len(body), len(body) + values.nbytes]
    header[name] = {"dtype": "I64", "shape": list(values.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body + values.tobytes())


def reference_drafts(head: dict[str, Array], embedding: Array, states: Array, text: list[int], count: int) -> list[int]:
    """`count` tokens that follow `text` [L]; states [L - 1, 3 H] are the served model's, of all but the last token."""
    head = {name: values.astype(np.float64) if name != "tokens" else values for name, values in head.items()}
    inputs = [row @ head["fc.weight"].T for row in states.astype(np.float64)]
    tokens, found = list(text[1:]), list[int]()
    while len(found) < count:
        last = _layer(head, np.stack([embedding[token] for token in tokens]).astype(np.float64), np.stack(inputs))[-1]
        logits = _norm(last, head["norm.weight"]) @ head["lm_head.weight"].T
        found.append(int(head["tokens"][logits.argmax()]))
        tokens.append(found[-1])
        inputs.append(last)
    return found


def _layer(head: dict[str, Array], embeds: Array, features: Array) -> Array:
    def weight(name: str) -> Array:
        return head[f"midlayer.{name}.weight"]

    both = np.concatenate([_norm(embeds, weight("input_layernorm")), _norm(features, weight("hidden_norm"))], axis=1)
    length = len(both)
    q, k, v = (
        (both @ weight(f"self_attn.{name}_proj").T).reshape(length, -1, HEAD_DIM).swapaxes(0, 1) for name in "qkv"
    )
    q, k = _rotate(q), _rotate(k)
    k, v = (np.repeat(each, HEADS // KV_HEADS, axis=0) for each in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM)
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = (scores / scores.sum(axis=-1, keepdims=True)) @ v
    hidden = features + attended.swapaxes(0, 1).reshape(length, -1) @ weight("self_attn.o_proj").T
    x = _norm(hidden, weight("post_attention_layernorm"))
    gate = x @ weight("mlp.gate_proj").T
    inner = gate / (1 + np.exp(-gate)) * (x @ weight("mlp.up_proj").T)
    result: Array = hidden + inner @ weight("mlp.down_proj").T
    return result


def _norm(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPS) * weight
    return result


def _rotate(x: Array) -> Array:
    """Of heads [N, T, D] at positions 0, 1, ..."""
    half = HEAD_DIM // 2
    angles = np.arange(x.shape[1])[:, None] * THETA ** -(np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )
