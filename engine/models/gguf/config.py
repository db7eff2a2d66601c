"""A GGUF file's metadata as the object that config.json would hold, for `parse_config` to check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.engine.contract.config import PoolingName
from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.blocks import dequantize
from tessera.engine.gguf.model import GGUFModel
from tessera.engine.gguf.vocabulary import special_token_id, stop_token_ids
from tessera.engine.models.gguf.architectures import MIXTURE_KEY, gguf_architecture
from tessera.engine.models.gguf.keys import MAX_LAYERS, MOST, ArchitectureKeys
from tessera.engine.models.gguf.mixtures import expert_keys, num_layers
from tessera.engine.models.gguf.names import SECOND_NORM
from tessera.engine.models.registry import ARCHITECTURES

MAX_ROPE_FACTORS = 1024
FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
EMBEDDING = "token_embd.weight"
# Architectures that llama.cpp gives another one's name to, told by their windows.
WINDOWED = {"LlamaForCausalLM": "MistralForCausalLM", "Olmo2ForCausalLM": "Olmo3ForCausalLM"}
GEMMA_27B_LAYERS = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
WINDOW = "attention.sliding_window"
TEMPERATURE = "attention.temperature_scale"  # of Ministral 3
GPT_OSS, MINICPM = "GptOssForCausalLM", "MiniCPMForCausalLM"
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(model: GGUFModel) -> dict[str, Any]:
    """The keys of config.json and generation_config.json that the metadata and tensors tell.

    Raises: ModelError naming the key at fault.
    """
    metadata, architecture = model.metadata, gguf_architecture(model.metadata)
    keys = ArchitectureKeys(metadata)
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        keys.refuse("attention.value_length", f"the length of keys, {head_dim}")
    if keys.has(TEMPERATURE) and keys.number(TEMPERATURE, 0.0, 1e6):
        keys.refuse(TEMPERATURE, "0: queries that are scaled by their position are not supported")
    context_length = keys.integer("context_length")
    tensors = model.tensors
    if EMBEDDING not in tensors:
        raise ModelError(f"{metadata.path} has no tensor {EMBEDDING}, so it holds no model")
    vocab_size = tensors[EMBEDDING].shape[0]
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(keys),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": None if keys.has(MIXTURE_KEY) else keys.integer("feed_forward_length"),
        "max_position_embeddings": context_length,
        "rms_norm_eps": _norm_eps(keys),
        "sliding_window": keys.integer(WINDOW, _unsaid_window(architecture.name, context_length)) or None,
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0, 1e9, 0.0) or None,
        "is_causal": keys.boolean("attention.causal"),
        "use_parallel_residual": keys.boolean("use_parallel_residual"),
        **_window_pattern(keys),
        **_biases(model),
        **_multipliers(keys, architecture.multipliers),
        **_soft_caps(keys),
        **_falcon(model),
        **expert_keys(keys, architecture),
        "tie_word_embeddings": "output.weight" not in tensors,
        "type_vocab_size": metadata.integer("tokenizer.ggml.token_type_count", 1, MOST, 1),
        **_rope(model, keys, head_dim, context_length),
    }
    name = architecture.name
    if values["sliding_window"] is not None:
        name = WINDOWED.get(name, name)
    values |= _scalar(name, values)
    values = {**_unsaid_multipliers(name, values), **values}
    if name == GPT_OSS and "rope_scaling" in values:
        values["rope_scaling"]["truncate"] = False  # of which the metadata have no key
    known = ARCHITECTURES.get(name)
    known_absent = known.defaults_if_absent if known is not None else {}
    renamed = {known.key(key) if known is not None else key: value for key, value in values.items()}
    return {
        "architectures": [name],
        "model_type": architecture.model_type,
        **{key: value for key, value in renamed.items() if value is not None or key in known_absent},
        "bos_token_id": special_token_id(metadata, "bos", vocab_size),
        "eos_token_id": list(stop_token_ids(metadata)),
        "torch_dtype": _dtype_name(model),
    }


def _unsaid_window(name: str, context_length: int) -> int:
    """Of Gemma 2 and of Phi-3 with a context of 4096, whose first files have no key (llama.cpp, pull requests 8227 and
    8931)."""
    if name == "Gemma2ForCausalLM":
        return 4096
    return 2047 if name == "Phi3ForCausalLM" and context_length == 4096 else 0


def _window_pattern(keys: ArchitectureKeys) -> dict[str, Any]:
    """Which layers the sliding window is for: a flag for each, or all but every n-th."""
    name = "attention.sliding_window_pattern"
    if not keys.has(name):
        return {}
    if not keys.metadata.is_array(keys.prefix + name):
        return {"sliding_window_pattern": keys.integer(name)}
    flags = keys.metadata.booleans(keys.prefix + name)
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags[:MAX_LAYERS].tolist()]}


def _biases(model: GGUFModel) -> dict[str, bool]:
    """By the first layer's tensors, under all names that architectures have for them."""
    names = ("attn_q", "attn_qkv", "attn_output", "ffn_up")
    separate, fused, out, mlp = (f"blk.0.{name}.bias" in model.tensors for name in names)
    attention, norms = separate or fused, "blk.0.attn_q_norm.weight" in model.tensors
    return {
        "attention_bias": attention,
        "bias": attention,
        "use_qkv_bias": attention,
        "use_bias": attention,
        "attention_out_bias": out,
        "mlp_bias": mlp,
        "qk_layernorm": norms,
        "use_qk_norm": norms,
        "lm_head_bias": "output.bias" in model.tensors,
    }


def _falcon(model: GGUFModel) -> dict[str, bool]:
    """Its halves are always parallel, with a norm each where there are two."""
    return {"parallel": True, "parallel_norms": SECOND_NORM in model.tensors, "multi_query": True}


def _soft_caps(keys: ArchitectureKeys) -> dict[str, float | None]:
    """Gemma 2's."""
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: keys.number(name, 0.0, 1e6) or None for name in names if keys.has(name)}


def _scalar(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The scalar of Gemma 2 and 3 by whose root queries are divided: a head's length, in the largest model
    the width of the model divided by its heads."""
    if values["num_hidden_layers"] == GEMMA_27B_LAYERS.get(name):
        return {"query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"]}
    return {"query_pre_attn_scalar": values["head_dim"]}


def _multipliers(keys: ArchitectureKeys, names: Mapping[str, str]) -> dict[str, float]:
    return {theirs: keys.number(ours, 1e-6, 1e6) for ours, theirs in names.items() if keys.has(ours)}


def _unsaid_multipliers(name: str, values: dict[str, Any]) -> dict[str, float]:
    """MiniCPM's, of which its first files have no keys (llama.cpp, llama-model.cpp)."""
    if name != MINICPM:
        return {}
    return {
        "scale_emb": 12.0,
        "residual_multiplier": 1.4 / math.sqrt(values["num_hidden_layers"]),
        "logits_divisor": values["hidden_size"] / 256,
    }


def _norm_eps(keys: ArchitectureKeys) -> float:
    rms = "attention.layer_norm_rms_epsilon"
    return keys.number(rms if keys.has(rms) else "attention.layer_norm_epsilon", 0.0, 1.0)


def _dtype_name(model: GGUFModel) -> str:
    """That of most weights; quantised ones are multiplied by activations of the widest range."""
    bytes_of = model.count_types()
    most = max(bytes_of, key=lambda name: bytes_of[name], default="F32")
    return DTYPE_NAMES.get(most, "bfloat16")


# -- pooling --------------------------------------------------------------------------------------

POOLING_KINDS: dict[int, PoolingName] = {1: "mean", 2: "cls", 3: "last"}


def read_pooling(model: GGUFModel) -> PoolingName | None:
    """How token vectors become an embedding; None where the metadata do not say."""
    keys = ArchitectureKeys(model.metadata)
    return POOLING_KINDS.get(keys.integer("pooling_type", 0))


# -- RoPE -----------------------------------------------------------------------------------------


def _rope(model: GGUFModel, keys: ArchitectureKeys, head_dim: int, context_length: int) -> dict[str, Any]:
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if not 0 < rotary_dim <= head_dim:
        keys.refuse("rope.dimension_count", f"from 1 to the length of keys, {head_dim}")
    original = keys.integer("rope.scaling.original_context_length", context_length)
    found = {
        "rope_theta": keys.number("rope.freq_base", 1.0, 1e15, 10000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1.0, 1e15, 10000.0),
        "partial_rotary_factor": rotary_dim / head_dim,
    }
    scaling = _listed_factors(model, keys, rotary_dim // 2) or _scaling(keys, original)
    if scaling is None:
        return found
    return {**found, "rope_scaling": {**scaling, "original_max_position_embeddings": original}}


def _listed_factors(model: GGUFModel, keys: ArchitectureKeys, pairs: int) -> dict[str, Any] | None:
    """Frequencies divided by a factor for each rotary pair: one list, or one for each side of the old context.

    Llama 3.1's rule comes as such a list as well.
    """
    if FREQUENCIES in model.tensors:
        factors = _factors(model, FREQUENCIES, pairs)
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    if LONG_FACTORS in model.tensors and SHORT_FACTORS in model.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": _factors(model, SHORT_FACTORS, pairs),
            "long_factor": _factors(model, LONG_FACTORS, pairs),
            "attention_factor": keys.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0),
        }
    return None


def _factors(model: GGUFModel, name: str, pairs: int) -> list[float]:
    info = model.tensors[name]
    if info.shape != (pairs,) or pairs > MAX_ROPE_FACTORS or info.type.is_quantized:
        raise ModelError(
            f"{model.file_of(name)}: tensor {name} is {info.type.name} of shape {list(info.shape)}; "
            f"it must have one plain number for each of {pairs} rotary pairs"
        )
    factors: list[float] = dequantize(model.stored(name), info.type).ravel().tolist()
    return factors


def _scaling(keys: ArchitectureKeys, original: int) -> dict[str, Any] | None:
    kind = keys.string("rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        return None
    if kind not in ("linear", "yarn"):
        keys.refuse("rope.scaling.type", "none, linear, yarn or longrope")
    factor = keys.number("rope.scaling.factor", 0.0, 1e4, 1.0) or 1.0
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.has(f"rope.scaling.{ours}"):
            scaling[theirs] = keys.number(f"rope.scaling.{ours}", 1e-3, 1e6)
    attention = keys.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
    if attention != 1.0:
        # YaRN's own temperature (Peng et al. 2023, equation 22) is multiplied by the file's.
        scaling["attention_factor"] = attention * float(1.0 + 0.1 * np.log(factor))
    return scaling
