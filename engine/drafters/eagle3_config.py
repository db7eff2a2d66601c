"""config.json of an EAGLE-3 head (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models
via Training-Time Test"), in the form of the published heads that vLLM and SGLang read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.config import ModelConfig, parse_config
from tessera.engine.models.fields import Fields, read_json_object

NUM_FEATURES = 3  # hidden states of the served model that make a feature
MAX_VOCAB = 2**22


@dataclass(frozen=True)
class Eagle3Config:
    """Of a head.

    Attributes:
        model: the head as a model of one layer, whose vocabulary is that of drafts.
        feature_layers: layers of the served model whose inputs make a feature, ascending.
        norm_before_residual: the layer adds to the normalised feature, not to the feature.
    """

    folder: Path
    model: ModelConfig
    feature_layers: tuple[int, ...]
    norm_before_residual: bool


def read_eagle3(folder: Path, served: ModelConfig) -> Eagle3Config:
    """Raises: ConfigError where it is not the head of a model such as `served`."""
    path, name = folder / "config.json", f"the EAGLE-3 head {folder}"
    if not path.is_file():
        raise ConfigError(f"{name} has no config.json; give a folder with config.json and *.safetensors")
    values = read_json_object(path)
    fields = Fields(str(path), values)
    listed = values.get("architectures")
    if not isinstance(listed, list) or not any(isinstance(each, str) and "eagle3" in each.lower() for each in listed):
        raise ConfigError(f"{name} is of another kind: architectures of its config.json must name an Eagle3 model")
    if "transformer_layer_config" in values:
        raise ConfigError(f"{name} is in the form of the speculators library, which is not supported")
    if values.get("num_hidden_layers") != 1:
        raise ConfigError(f"{name} must have one layer: num_hidden_layers is {values.get('num_hidden_layers')}")
    for key, own, theirs in (
        ("vocab_size", values.get("vocab_size"), served.vocab_size),
        ("hidden_size", values.get("target_hidden_size", values.get("hidden_size")), served.hidden_size),
        ("hidden_size", values.get("hidden_size"), served.hidden_size),
    ):
        if own != theirs:
            raise ConfigError(f"{name} is for another model: its {key} is {own}, and the served model's {theirs}")
    num_tokens = fields.integer("draft_vocab_size", 1, MAX_VOCAB) if fields.has("draft_vocab_size") else None
    inner = {
        **values,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens or served.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": served.longest_context,  # of drafts; what the file says is of the training
    }
    for key in ("eos_token_id", "bos_token_id", "quantization_config"):
        inner.pop(key, None)
    model = parse_config(inner, {}, str(path))
    head_dim = model.layers[0].attention.head_dim
    if model.hidden_size % (2 * head_dim):
        raise ConfigError(f"{name}: a hidden size of {model.hidden_size} does not divide into heads of {2 * head_dim}")
    own = fields.section("eagle_config")
    layers = own.raw("eagle_aux_hidden_state_layer_ids")
    count = served.num_layers
    if layers is None:
        chosen = [min(2, count - 1), count // 2, max(count - 3, 0)]
    elif (
        isinstance(layers, list) and len(layers) == NUM_FEATURES and all(layer in range(count - 1) for layer in layers)
    ):
        chosen = [layer + 1 for layer in layers]  # whose outputs they are
    else:
        raise ConfigError(f"{name}: eagle_aux_hidden_state_layer_ids must be {NUM_FEATURES} of the {count} layers")
    before = own.raw("norm_before_residual") or values.get("norm_before_residual")
    return Eagle3Config(folder, model, tuple(sorted(chosen)), norm_before_residual=bool(before))
