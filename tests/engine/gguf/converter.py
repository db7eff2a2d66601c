"""Tiny models as GGUF files: names by the `gguf` package, rows and factors as llama.cpp's converter stores them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tessera.engine.models.config import parse_config
from tessera.engine.models.rope import inverse_frequencies
from tests.engine.gguf.writer import Stored, write_gguf
from tests.support.models.tiny_models import TinyModel, make_tensors

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
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "phi": gguf.MODEL_ARCH.PHI2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "internlm2": gguf.MODEL_ARCH.INTERNLM2,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "baichuan": gguf.MODEL_ARCH.BAICHUAN,
    "minicpm": gguf.MODEL_ARCH.MINICPM,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
PERMUTED = (
    "llama",
    "mistral",
    "smollm3",
    "granite",
    "olmo",
    "internlm2",
    "baichuan",
    "minicpm",
    "arcee",
    "mixtral",
    "granitemoe",
)
OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text", "nemotron")
BY_HEAD = ("gpt_neox", "falcon", "internlm2")  # fused queries, keys and values that checkpoints have by key/value head
SPLIT = {"internlm2": ("attention.wqkv", "attention.w{}"), "baichuan": ("W_pack", "{}_proj")}
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
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "attention.sliding_window_pattern": ("sliding_window_pattern",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}


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
    for name, values in converted(config, tensors):
        stem, _, suffix = name.removeprefix(prefix).rpartition(".")
        if stem.endswith("moe_statics") or suffix == "e_score_correction_bias":
            values, stem, suffix = values.reshape(-1), f"{stem}.e_score_correction", "bias"
        if stem.endswith("shared_expert_gate"):
            values = values.reshape(-1)
        if suffix == "sinks":
            stem, suffix = f"{stem}.sinks", "weight"
        stored_name = f"{names.get_name(stem) if not stem.startswith('blk.') else stem}.{suffix}"
        if kind == "gpt2" and any(part in name for part in ("c_attn", "c_proj", "c_fc")):
            values = values.T
        if kind in PERMUTED and re.search(r"[.](q_proj|k_proj|wq|wk)[.]", name):
            heads = config["num_attention_heads"] if re.search(r"q_proj|wq", name) else kv_heads_of(config)
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        found[stored_name] = store(stored_name, np.ascontiguousarray(values))
    keys = {**metadata_of(config), **(metadata or {})}
    _add_rope(gguf.MODEL_ARCH_NAMES[architecture], config, keys, found)
    return write_gguf(path, keys, found)


def kv_heads_of(config: Mapping[str, Any]) -> int:
    heads: int = config.get("num_attention_heads") or config["n_head"]
    if config["model_type"] == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    if config["model_type"] == "gpt_bigcode":
        return 1
    found: int = config.get("num_kv_heads") or config.get("num_key_value_heads") or heads
    return found


def converted(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Tensors as llama.cpp divides them, before it permutes rows of queries and keys."""
    kind, kv_heads = config["model_type"], kv_heads_of(config)
    tensors = dict(tensors)
    yield from stacked_experts(config, tensors)
    for name in [name for name in tensors if name.endswith("layernorm.norms.0.weight")]:  # of each head, stacked
        stem = name.removesuffix(".norms.0.weight")
        own = [other for other in tensors if other.startswith(f"{stem}.norms.")]
        tensors[f"{stem}.weight"] = np.stack([tensors[f"{stem}.norms.{head}.weight"] for head in range(len(own))])
        for other in own:
            del tensors[other]
    for name, values in tensors.items():
        if kind in OFFSET_NORMS and name.endswith("norm.weight"):
            values = values + 1
        fused = any(part in name for part in ("query_key_value", "wqkv", "W_pack"))
        parts = [values]
        if fused:
            head_dim = config["hidden_size"] // config["num_attention_heads"]
            group = config["num_attention_heads"] // kv_heads
            if kind in BY_HEAD:
                heads = values.reshape(kv_heads, group + 2, head_dim, *values.shape[1:])
                parts = [heads[:, :group], heads[:, group], heads[:, group + 1]]
            else:
                parts = np.split(values, 3)
            parts = [part.reshape(-1, *values.shape[1:]) for part in parts]
        if fused and kind in SPLIT:
            old, new = SPLIT[kind]
            yield from (
                (name.replace(old, new.format(letter)), part) for letter, part in zip("qkv", parts, strict=True)
            )
        else:
            yield name, np.concatenate(parts)


def stacked_experts(config: Mapping[str, Any], tensors: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """Takes the experts out of `tensors`; those of a layer become one tensor each of gate, up and down."""
    each: dict[tuple[int, str, str], dict[int, Array]] = {}
    parts = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
    for name in [name for name in tensors if ".experts." in name or "put_linear." in name]:
        values, layer = tensors.pop(name), int(name.split(".")[2])
        kind = "bias" if name.endswith("_bias") else "weight"
        found = re.search(r"experts\.(\d+)\.(\w+)\.weight", name)
        if found is not None:
            each.setdefault((layer, parts[found[2]], kind), {})[int(found[1])] = values
            continue
        if "gate_up_proj" in name or "input_linear" in name:
            if config["model_type"] == "gpt_oss":
                values = values if kind == "bias" else values.swapaxes(1, 2)
                gate, up = values[:, ::2], values[:, 1::2]
            else:
                gate, up = np.split(values, 2, axis=1)
            yield from ((f"blk.{layer}.ffn_{part}_exps.{kind}", half) for part, half in (("gate", gate), ("up", up)))
        else:
            swaps = config["model_type"] == "gpt_oss" and kind == "weight"
            yield f"blk.{layer}.ffn_down_exps.{kind}", values.swapaxes(1, 2) if swaps else values
    for (layer, part, kind), experts in each.items():
        yield f"blk.{layer}.ffn_{part}_exps.{kind}", np.stack([experts[expert] for expert in sorted(experts)])


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the architecture, without RoPE's scaling and the tokenizer."""
    kind = config["model_type"]
    prefix = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]]
    metadata: dict[str, Any] = {"general.architecture": prefix}
    for key, candidates in NUMBERS.items():
        value = next((config[name] for name in candidates if config.get(name) is not None), None)
        if value is not None:
            metadata[f"{prefix}.{key}"] = value
    if "n_embd" in config and config.get("n_inner") is None:
        metadata[f"{prefix}.feed_forward_length"] = 4 * config["n_embd"]
    if kind == "bert":
        metadata["tokenizer.ggml.token_type_count"] = config["type_vocab_size"]
    if kind in ("cohere", "cohere2"):
        metadata[f"{prefix}.logit_scale"] = config["logit_scale"]
    if kind == "minicpm":
        residual = config["scale_depth"] / config["num_hidden_layers"] ** 0.5
        metadata |= {f"{prefix}.embedding_scale": float(config["scale_emb"]), f"{prefix}.residual_scale": residual}
        metadata[f"{prefix}.logit_scale"] = config["hidden_size"] / config["dim_model_base"]
    if kind == "falcon":
        metadata[f"{prefix}.feed_forward_length"] = config.get("ffn_hidden_size", 4 * config["hidden_size"])
    metadata[f"{prefix}.attention.head_count_kv"] = kv_heads_of(config)
    parsed = parse_config({**config}, {})
    norm = parsed.final_norm or parsed.embedding_norm
    assert norm is not None
    metadata[f"{prefix}.attention.layer_norm_{'rms_' if norm.kind == 'rmsnorm' else ''}epsilon"] = norm.eps
    if kind == "olmo3":
        windows = [layer.attention.sliding_window is not None for layer in parsed.layers]
        metadata[f"{prefix}.attention.sliding_window_pattern"] = windows
    metadata[f"{prefix}.rope.freq_base"] = float(config.get("rope_theta", 10000.0))
    return metadata


def _add_rope(prefix: str, config: Mapping[str, Any], metadata: dict[str, Any], tensors: dict[str, Stored]) -> None:
    ropes = parse_config({**config}, {}).ropes
    if not ropes:
        return
    rope = ropes[0]
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
