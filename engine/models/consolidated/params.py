"""params.json of Mistral's own form of checkpoints, as config.json would have it.

Source of the keys: mistral-inference, args.py, and vLLM, transformers_utils/configs/mistral.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import read_json_object, shown

CONFIG_FILE, PARAMS_FILE = "config.json", "params.json"
CONSOLIDATED_FILE = "consolidated.safetensors"
CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"
DEFAULT_CONTEXT = 128_000  # of files that do not say it, as in vLLM

KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
}
OPTIONAL = {
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "dtype": "torch_dtype",
}
# What these say is what the forward does.
HARMLESS = {"model_type": "transformer", "activation": "silu", "use_biases": False, "causal": True}
VISION = ("vision_encoder", "multimodal")


def is_consolidated(folder: Path) -> bool:
    return (folder / PARAMS_FILE).is_file() and not (folder / CONFIG_FILE).is_file()


def read_params(folder: Path, notes: list[str]) -> dict[str, Any]:
    """As config.json would have it; what is left out is added to `notes`.

    Raises: ModelError naming a key that is missing, or one that asks for more than the forward does.
    """
    path = folder / PARAMS_FILE
    params = {key: value for key, value in read_json_object(path, notes).items() if value is not None}
    missing = next((key for key in KEYS if key != "rope_theta" and key not in params), None)
    if missing is not None:
        raise ModelError(f"{path}: {missing} is missing")
    for key, value in params.items():
        if key in KEYS or key in OPTIONAL or key in VISION or HARMLESS.get(key) == value or value is False:
            continue
        raise ModelError(
            f"{path}: {key} is {shown(value)}, which is not supported in this form of checkpoints; get the model's "
            f"version with {CONFIG_FILE}"
        )
    if any(key in params for key in VISION):
        notes.append(f"{folder} has a part that sees: its language model is served, for text alone")
    values: dict[str, Any] = {"max_position_embeddings": DEFAULT_CONTEXT, "sliding_window": None}
    values |= {name: params[key] for key, name in {**KEYS, **OPTIONAL}.items() if key in params}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **values}
