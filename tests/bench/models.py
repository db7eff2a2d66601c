"""Folders of the benchmark architectures: config and tokenizer, no weights (serve with --load-format dummy)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, models, pre_tokenizers

from tessera.engine.formats import KVFormat
from tessera.engine.models.config import DTYPES, load_config
from tessera.engine.models.kv_cache import block_bytes
from tests.bench.mixtures import MIXTURES, mixture_decode_bytes

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 10240,
    "vocab_size": 262208,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, Any] = {  # quick on a CPU
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
    "dtype": "float32",
}
CONFIGS = {"qwen3-0.6b": QWEN3_06B, "llama-8b": LLAMA_8B}
OTHERS = {"gemma-3-4b": GEMMA_3_4B, "llama-70b": LLAMA_70B}
DENSE = {**CONFIGS, **OTHERS}


def write_model(root: Path, name: str, config: dict[str, Any] | None = None) -> Path:
    """Make `root/name` with config.json and a word-level tokenizer of the model's vocabulary size."""
    config = {**DENSE, **MIXTURES}[name] if config is None else config
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 131072,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


MODEL_HELP = f"a folder, or random weights of {', '.join(DENSE)} (default: of a tiny model)"


def engine_model(name: str | None, root: Path) -> tuple[str, Literal["auto", "dummy"]]:
    """The folder of MODEL_HELP's `name`, made below `root` where it is none yet, and how its weights are loaded."""
    if name is None:
        return str(write_model(root, "tiny", TINY)), "dummy"
    if name in DENSE:
        return str(write_model(root, name)), "dummy"
    return name, "auto"


def kv_block_bytes(folder: str, block_size: int, device: str) -> int:
    """Bytes of a KV block, in the dtype in which models are served on the device."""
    dtype = DTYPES["float32" if device == "cpu" else "bfloat16"]
    return block_bytes(load_config(Path(folder)), block_size, KVFormat(dtype))


BITS = {None: 16.0, "fp8": 8.0, "int4": 4.25}  # of an element of a layer, by the server's option


def decode_bytes(name: str, streams: int = 1, quantization: str | None = None) -> int:
    """Bytes of weights that one decode step of so many tokens must read: all but an untied embedding table.

    `quantization`: of a dense model's layers, as the server's option names it.
    """
    if name in MIXTURES:
        return mixture_decode_bytes(MIXTURES[name], streams)
    config = DENSE[name]
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * config["head_dim"] * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"]
    head = config["vocab_size"] * hidden
    return int(BITS[quantization] / 8 * config["num_hidden_layers"] * layer + 2 * head)
