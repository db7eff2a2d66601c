"""Writes family_tensors.json and golden_families.npz: the tensors of each tiny model of
tests/support/models/tiny_families.py and the logits that Hugging Face transformers computes from them.

Run from the project's root in an environment with torch and transformers (made with torch 2.13 and transformers 5.23 on
a CPU), in none that the project itself uses:

    python tests/golden/make_golden_families.py

A model that transformers does not have is computed as one of another name whose weights are the same in another order.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.models.tiny_families import (
    FAMILIES,
    LENGTH,
    OFFSET_NORMS,
    POSITIONS,
    SHAPES_FILE,
    VOCAB,
    Shapes,
    fill,
    prompt,
)
from tests.support.models.tiny_models import write_safetensors

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
INTERNLM2_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "output.weight": "lm_head.weight",
}


def internlm2_to_llama(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Its wqkv has each key/value head's queries, key and value together."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    group, head_dim = heads // kv_heads, config["hidden_size"] // heads
    found = {}
    for name, tensor in tensors.items():
        for old, new in INTERNLM2_NAMES.items():
            name = name.replace(old, new)
        if "attention.wqkv" not in name:
            found[name] = tensor
            continue
        parts = tensor.reshape(kv_heads, group + 2, head_dim, *tensor.shape[1:])
        for letter, part in (("q", parts[:, :group]), ("k", parts[:, group]), ("v", parts[:, group + 1])):
            rows = np.ascontiguousarray(part).reshape(-1, *tensor.shape[1:])
            found[name.replace("attention.wqkv", f"self_attn.{letter}_proj")] = rows
    return {**config, "model_type": "llama", "attention_bias": config["bias"]}, found


def baichuan_to_llama(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """W_pack has queries, keys and values; the second generation's head is normalised."""
    found = {}
    for name, tensor in tensors.items():
        if "W_pack" in name:
            for letter, rows in zip("qkv", np.split(tensor, 3), strict=True):
                found[name.replace("W_pack", f"{letter}_proj")] = rows
        elif name == "lm_head.weight" and config["vocab_size"] == 125696:
            found[name] = tensor / np.linalg.norm(tensor, axis=1, keepdims=True)
        else:
            found[name] = tensor
    return {**config, "model_type": "llama"}, found


def minicpm_to_granite(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Both are Llamas with multipliers."""
    heads = config["num_attention_heads"]
    changes = {
        "embedding_multiplier": float(config["scale_emb"]),
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "attention_multiplier": (config["hidden_size"] // heads) ** -0.5,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return {**config, "model_type": "granite", **changes}, tensors


def mimo_to_qwen2(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """But for its layers of multi-token prediction, which are not computed here."""
    return {**config, "model_type": "qwen2"}, tensors


CONVERSIONS: dict[str, Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]] = {
    "internlm2": internlm2_to_llama,
    "baichuan": baichuan_to_llama,
    "minicpm": minicpm_to_granite,
    "mimo": mimo_to_qwen2,
}


def own_shapes(config: dict[str, Any]) -> Shapes:
    """Of models that transformers does not have."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_width = config.get("num_key_value_heads", heads) * hidden // heads
    kind = config["model_type"]
    embedding, head = ("tok_embeddings", "output") if kind == "internlm2" else ("embed_tokens", "lm_head")
    found = {f"model.{embedding}.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not config.get("tie_word_embeddings", True):
        found[f"{head}.weight"] = [vocab, hidden]
    modules = {
        "internlm2": {
            "attention.wqkv": [hidden + 2 * kv_width, hidden],
            "attention.wo": [hidden, hidden],
            "feed_forward.w1": [inner, hidden],
            "feed_forward.w3": [inner, hidden],
            "feed_forward.w2": [hidden, inner],
            "attention_norm": [hidden],
            "ffn_norm": [hidden],
        },
        "baichuan": {"self_attn.W_pack": [3 * hidden, hidden]},
        "minicpm": {
            "self_attn.q_proj": [hidden, hidden],
            "self_attn.k_proj": [kv_width, hidden],
            "self_attn.v_proj": [kv_width, hidden],
        },
        "mimo": {
            "self_attn.q_proj": [hidden, hidden],
            "self_attn.k_proj": [kv_width, hidden],
            "self_attn.v_proj": [kv_width, hidden],
        },
    }[kind]
    if kind != "internlm2":
        modules |= {"self_attn.o_proj": [hidden, hidden], "mlp.down_proj": [hidden, inner]}
        modules |= {"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden]}
        modules |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        for module, shape in modules.items():
            found[f"model.layers.{layer}.{module}.weight"] = shape
            has_bias = kind == "mimo" and module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            if has_bias or (config.get("bias") and "attention.w" in module):
                found[f"model.layers.{layer}.{module}.bias"] = shape[:1]
    return found


def saved_shapes(config: dict[str, Any], folder: Path) -> Shapes:
    """Of a model that transformers saves."""
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder / "saved")
    with (folder / "saved" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in sorted(header.items()) if name != "__metadata__"}


def logits(config: dict[str, Any], tensors: Tensors, folder: Path) -> Array:
    """[LENGTH, V]"""
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "architectures"}))
    write_safetensors(folder / "model.safetensors", tensors)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind}: {info[kind]}"
    with torch.no_grad():
        found: Array = loaded.eval()(torch.tensor([prompt()])).logits[0].numpy()
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shapes: dict[str, Shapes] = {}
    golden: dict[str, Array] = {}
    for name, config in FAMILIES.items():
        kind = config["model_type"]
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            shapes[name] = own_shapes(config) if kind in CONVERSIONS else saved_shapes(config, folder)
            tensors = fill(name, shapes[name], kind in OFFSET_NORMS)
            reference, stored = CONVERSIONS[kind](config, tensors) if kind in CONVERSIONS else (config, tensors)
            (folder / "golden").mkdir()
            found = logits(reference, stored, folder / "golden")
        assert found.shape[0] == LENGTH
        golden[name] = found[list(POSITIONS), :VOCAB].astype(np.float32)
        checked = json.dumps(config).encode() + b"".join(tensor.tobytes() for tensor in tensors.values())
        golden[f"{name}/crc32"] = np.array(zlib.crc32(checked), np.uint32)
        top = np.sort(torch.softmax(torch.tensor(found), -1).numpy(), axis=-1)[:, -1]
        print(f"{name:22} max |logit| {abs(found).max():6.2f}, mean top probability {top.mean():.2f}")
    rows = [f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items()]
    SHAPES_FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    np.savez_compressed(Path(__file__).with_name("golden_families.npz"), **cast(Any, golden))


if __name__ == "__main__":
    main()
