"""Tiny models with random weights, one or more for every supported architecture, built from seeds.

Needs NumPy only and nothing of the project, so that the script that makes the golden logits can run
in an environment of its own. Weights are large enough for logits and attention far from uniform, and
exactly representable in bfloat16, so that a 16-bit run differs by its activations alone.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

VOCAB_SIZE = 128
PROMPT_LEN = 40


@dataclass(frozen=True)
class TinyModel:
    """`max_model_len` is what the golden logits hold for; tensors are stored as `storage`."""

    name: str
    config: dict[str, Any]
    max_model_len: int = 64
    storage: str = "F32"
    num_shards: int = 1
    prefix: str = ""
    extra_files: dict[str, str] = field(default_factory=dict)


def prompt() -> list[int]:
    token_ids: list[int] = np.random.RandomState(20).randint(3, VOCAB_SIZE, PROMPT_LEN).tolist()
    return token_ids


def build(model: TinyModel, folder: Path) -> Path:
    """Write the model's folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=1))
    for name, text in model.extra_files.items():
        (folder / name).write_text(text)
    tensors = make_tensors(model)
    if model.num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, model.storage)
        return folder
    weight_map = {}
    for shard in range(model.num_shards):
        file_name = f"model-{shard + 1:05}-of-{model.num_shards:05}.safetensors"
        names = list(tensors)[shard :: model.num_shards]
        write_safetensors(folder / file_name, {name: tensors[name] for name in names}, model.storage)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(path: Path, tensors: dict[str, Array], storage: str = "F32") -> None:
    """float32 tensors in the format's order: header length, header, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts = []
    offset = 0
    for name, tensor in tensors.items():
        raw = _stored(tensor, storage)
        header[name] = {"dtype": storage, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _stored(tensor: Array, storage: str) -> bytes:
    if storage == "BF16":
        return (tensor.astype("<f4").view(np.uint32) >> 16).astype("<u2").tobytes()
    return tensor.astype({"F32": "<f4", "F16": "<f2"}[storage]).tobytes()


def round_to_bfloat16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


# -- weights --------------------------------------------------------------------------------------


class _Random:
    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)  # its stream is frozen, unlike Generator's

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> Array:
        return round_to_bfloat16(self._state.standard_normal(shape) * std + mean)

    def norm(self, size: int, mean: float = 1.0) -> Array:
        return self.normal(size, std=0.25, mean=mean)


def make_tensors(model: TinyModel) -> dict[str, Array]:
    random = _Random(zlib.crc32(model.name.encode()))
    make = _gpt2_tensors if model.config["model_type"] == "gpt2" else _llama_tensors
    return {model.prefix + name if name != "lm_head.weight" else name: t for name, t in make(model.config, random)}


def _llama_tensors(config: dict[str, Any], random: _Random) -> list[tuple[str, Array]]:
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


def _gpt2_tensors(config: dict[str, Any], random: _Random) -> list[tuple[str, Array]]:
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


# -- the models -----------------------------------------------------------------------------------


def _llama_like(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **changes,
    }


def _llama(**changes: Any) -> dict[str, Any]:
    return _llama_like("LlamaForCausalLM", "llama", **changes)


def _phi3(**changes: Any) -> dict[str, Any]:
    return _llama_like("Phi3ForCausalLM", "phi3", original_max_position_embeddings=64, **changes)


def _gpt2(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_positions": 64,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **changes,
    }


def _factors(seed: int, low: float, high: float) -> list[float]:
    return [round(factor, 4) for factor in np.random.RandomState(seed).uniform(low, high, 8).tolist()]


LONGROPE = {"type": "longrope", "short_factor": _factors(1, 1.0, 1.5), "long_factor": _factors(2, 2.0, 6.0)}

TINY_MODELS: dict[str, TinyModel] = {
    model.name: model
    for model in (
        TinyModel("llama", _llama()),
        TinyModel(
            "llama-tied-biases",
            _llama(tie_word_embeddings=True, head_dim=32, attention_bias=True, mlp_bias=True, num_key_value_heads=1),
        ),
        TinyModel("llama-linear", _llama(rope_scaling={"type": "linear", "factor": 4.0})),
        # The base of the dynamic kind follows the length; the golden logits are for one of PROMPT_LEN.
        TinyModel(
            "llama-dynamic",
            _llama(rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16),
            max_model_len=PROMPT_LEN,
        ),
        TinyModel(
            "llama-llama3",
            _llama(
                rope_theta=500.0,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            ),
            num_shards=3,
        ),
        TinyModel(
            "llama-yarn",
            _llama(
                rope_theta=500.0,
                rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            ),
        ),
        TinyModel(
            "llama-yarn-mscale",
            _llama(
                rope_theta=500.0,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "mscale": 1.5,
                    "mscale_all_dim": 0.5,
                    "beta_fast": 4,
                    "beta_slow": 0.5,
                    "truncate": False,
                },
            ),
        ),
        # As transformers 5 writes it: dtype and rope_parameters.
        TinyModel(
            "mistral-window",
            {
                key: value
                for key, value in _llama_like(
                    "MistralForCausalLM",
                    "mistral",
                    sliding_window=8,
                    dtype="float32",
                    rope_parameters={"rope_type": "default", "rope_theta": 300.0},
                ).items()
                if key not in ("rope_theta", "torch_dtype")
            },
        ),
        TinyModel("mistral", _llama_like("MistralForCausalLM", "mistral", sliding_window=None, head_dim=32)),
        TinyModel("qwen2", _llama_like("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True)),
        TinyModel(
            "qwen2-window",
            _llama_like(
                "Qwen2ForCausalLM",
                "qwen2",
                num_hidden_layers=4,
                use_sliding_window=True,
                sliding_window=8,
                max_window_layers=2,
            ),
        ),
        TinyModel(
            "qwen3",
            _llama_like("Qwen3ForCausalLM", "qwen3", head_dim=32, torch_dtype="bfloat16"),
            storage="BF16",
            num_shards=2,
        ),
        TinyModel(
            "smollm3",
            _llama_like("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=4, tie_word_embeddings=True),
        ),
        TinyModel(
            "smollm3-window",
            _llama_like(
                "SmolLM3ForCausalLM",
                "smollm3",
                no_rope_layers=[0, 1, 0],
                use_sliding_window=True,
                sliding_window=8,
                attention_bias=True,
                mlp_bias=True,
            ),
        ),
        TinyModel("phi3", _phi3(num_key_value_heads=4)),
        TinyModel("phi3-partial-window", _phi3(partial_rotary_factor=0.5, sliding_window=8)),
        TinyModel("phi3-longrope-short", _phi3(max_position_embeddings=128, rope_scaling=LONGROPE)),
        TinyModel(
            "phi3-longrope-long",
            {**_phi3(max_position_embeddings=128, rope_scaling=LONGROPE), "original_max_position_embeddings": 16},
            max_model_len=128,
        ),
        TinyModel("gpt2", _gpt2(torch_dtype="float16"), storage="F16"),
        TinyModel(
            "gpt2-variants",
            _gpt2(
                activation_function="gelu",
                n_inner=96,
                tie_word_embeddings=False,
                scale_attn_by_inverse_layer_idx=True,
            ),
            prefix="transformer.",
        ),
    )
}
