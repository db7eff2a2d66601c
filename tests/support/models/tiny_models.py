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

from tests.support.models.tiny_mixtures import MAKERS_OF_EXPERTS, TINY_MIXTURES, mixture_tensors
from tests.support.models.tiny_tensors import MAKERS, VOCAB_SIZE, Random, llama_tensors, round_to_bfloat16

__all__ = ["round_to_bfloat16"]

Array = np.ndarray[Any, Any]

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
    """Tensors of float32, and of bytes, in the format's order: header length, header, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts = []
    offset = 0
    for name, tensor in tensors.items():
        kind = "U8" if tensor.dtype == np.uint8 else storage
        raw = _stored(tensor, kind)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _stored(tensor: Array, storage: str) -> bytes:
    if storage == "BF16":
        return (tensor.astype("<f4").view(np.uint32) >> 16).astype("<u2").tobytes()
    return tensor.astype({"F32": "<f4", "F16": "<f2", "U8": "u1"}[storage]).tobytes()


def make_tensors(model: TinyModel) -> dict[str, Array]:
    random = Random(zlib.crc32(model.name.encode()))
    mixture = model.config["model_type"] in MAKERS_OF_EXPERTS
    make = mixture_tensors if mixture else MAKERS.get(model.config["model_type"], llama_tensors)
    return {model.prefix + name if name != "lm_head.weight" else name: t for name, t in make(model.config, random)}


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


def _seed_oss(**changes: Any) -> dict[str, Any]:
    settings = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 16}
    return _llama_like("SeedOssForCausalLM", "seed_oss", **{**settings, **changes})


def _starcoder2(**changes: Any) -> dict[str, Any]:
    settings = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-4, "use_bias": True, "sliding_window": None}
    return _llama_like("Starcoder2ForCausalLM", "starcoder2", **{**settings, **changes})


def _stablelm(**changes: Any) -> dict[str, Any]:
    settings = {"layer_norm_eps": 1e-4, "use_qkv_bias": False, "use_parallel_residual": False}
    return _llama_like("StableLmForCausalLM", "stablelm", **{**settings, **changes})


def _granite(**changes: Any) -> dict[str, Any]:
    settings = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.5,
    }
    return _llama_like("GraniteForCausalLM", "granite", **{**settings, **changes})


def _exaone4(**changes: Any) -> dict[str, Any]:
    return _llama_like("Exaone4ForCausalLM", "exaone4", **changes)


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
        TinyModel("llama-gelu", _llama(hidden_act="gelu_pytorch_tanh")),
        TinyModel("ministral", _llama_like("MinistralForCausalLM", "ministral", sliding_window=8, head_dim=16)),
        TinyModel(
            "ministral-pattern",
            _llama_like(
                "MinistralForCausalLM",
                "ministral",
                sliding_window=8,
                head_dim=32,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
            ),
        ),
        TinyModel("seed-oss", _seed_oss()),
        TinyModel("seed-oss-biases", _seed_oss(attention_out_bias=True, mlp_bias=True, head_dim=32)),
        TinyModel("starcoder2", _starcoder2(tie_word_embeddings=True)),
        TinyModel("starcoder2-window", _starcoder2(use_bias=False, sliding_window=8)),
        TinyModel("stablelm", _stablelm(num_key_value_heads=4)),
        TinyModel("stablelm-parallel", _stablelm(use_parallel_residual=True, use_qkv_bias=True)),
        TinyModel("granite", _granite()),
        TinyModel("granite-tied", _granite(tie_word_embeddings=True, attention_bias=True, logits_scaling=8.0)),
        TinyModel("exaone4", _exaone4(sliding_window_pattern=2, sliding_window=8)),
        TinyModel("exaone4-full", _exaone4(sliding_window=None, layer_types=["full_attention"] * 3)),
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
        *(TinyModel(name, config) for name, config in TINY_MIXTURES.items()),
    )
}
