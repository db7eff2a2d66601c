"""Tiny models as GGUF files: names by the `gguf` package, rows and factors as llama.cpp's converter stores them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tessera.engine.models.config import parse_config
from tessera.engine.models.rope import inverse_frequencies
from tests.engine.gguf.writer import Stored, write_gguf
from tests.support.tiny_models import TinyModel, make_tensors

Array = np.ndarray[Any, Any]
Store = Callable[[str, Array], Stored]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "bert": gguf.MODEL_ARCH.BERT,
}
PERMUTED = ("llama", "mistral", "smollm3", "granite")
NUMBERS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "use_parallel_residual": ("use_parallel_residual",),
}
EPSILONS = ("norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")


def plain(name: str, values: Array) -> Stored:
    return Stored.of(values)


def write_converted(path: Path, model: TinyModel, store: Store = plain) -> Path:
    """The GGUF file of a tiny model; `store` decides how each tensor is stored, by its GGUF name."""
    return convert(path, model.config, make_tensors(model), model.prefix, store)


def convert(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    prefix: str = "",
    store: Store = plain,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """The GGUF file of a model that is given as config.json and tensors; `metadata` has further keys."""
    kind = config["model_type"]
    architecture = ARCHITECTURES[kind]
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(architecture, num_layers)
    found: dict[str, Stored] = {}
    for name, values in tensors.items():
        stem, _, suffix = name.removeprefix(prefix).rpartition(".")
        stored_name = f"{names.get_name(stem)}.{suffix}"
        if kind == "gpt2" and any(part in name for part in ("c_attn", "c_proj", "c_fc")):
            values = values.T
        if kind in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        found[stored_name] = store(stored_name, np.ascontiguousarray(values))
    keys = {**metadata_of(config), **(metadata or {})}
    _add_rope(gguf.MODEL_ARCH_NAMES[architecture], config, keys, found)
    return write_gguf(path, keys, found)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the architecture, without RoPE's scaling and the tokenizer."""
    kind = config["model_type"]
    prefix = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]]
    metadata: dict[str, Any] = {"general.architecture": prefix}
    for key, candidates in NUMBERS.items():
        value = next((config[name] for name in candidates if config.get(name) is not None), None)
        if value is not None:
            metadata[f"{prefix}.{key}"] = value
    if config.get("n_inner", 0) is None:
        metadata[f"{prefix}.feed_forward_length"] = 4 * config["n_embd"]
    if kind == "bert":
        metadata["tokenizer.ggml.token_type_count"] = config["type_vocab_size"]
    epsilon = next(float(config[name]) for name in EPSILONS if name in config)
    rms = "rms_norm_eps" in config and kind not in ("starcoder2", "stablelm")
    metadata[f"{prefix}.attention.layer_norm_{'rms_' if rms else ''}epsilon"] = epsilon
    metadata[f"{prefix}.rope.freq_base"] = float(config.get("rope_theta", 10000.0))
    return metadata


def _add_rope(prefix: str, config: Mapping[str, Any], metadata: dict[str, Any], tensors: dict[str, Stored]) -> None:
    ropes = parse_config({**config}, {}).ropes
    if not ropes:
        return
    (rope,) = ropes
    scaling = f"{prefix}.rope.scaling"
    metadata[f"{prefix}.rope.dimension_count"] = rope.rotary_dim
    metadata[f"{prefix}.rope.freq_base"] = rope.theta
    if rope.kind in ("linear", "yarn"):
        metadata |= {f"{scaling}.type": rope.kind, f"{scaling}.factor": rope.factor}
    if rope.kind in ("yarn", "longrope"):
        metadata[f"{scaling}.original_context_length"] = rope.original_max_len
    if rope.kind == "llama3":
        factors = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim) / inverse_frequencies(rope, 1)
        tensors["rope_freqs.weight"] = Stored.of(factors)
    if rope.kind == "longrope":
        tensors["rope_factors_short.weight"] = Stored.of(np.array(rope.short_factor))
        tensors["rope_factors_long.weight"] = Stored.of(np.array(rope.long_factor))
        scale = config["max_position_embeddings"] / rope.original_max_len
        attention = math.sqrt(1 + math.log(scale) / math.log(rope.original_max_len)) if scale > 1 else 1.0
        metadata[f"{scaling}.attn_factor"] = attention
