"""config.json of an EAGLE-3 head (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models
via Training-Time Test"), in the forms of the published heads that vLLM and SGLang read: of the paper's authors and of
the speculators library, which has the layer's values in a section of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.config import ModelConfig, parse_config
from tessera.engine.models.fields import Fields, read_json_object

NUM_FEATURES = 3  # hidden states of the served model that make a feature
MAX_VOCAB = 2**22
LAYER_SECTION = "transformer_layer_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # which no head of the paper has


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
    values = {**Fields(str(path), values).section(LAYER_SECTION).values, **values}
    values.pop(LAYER_SECTION, None)
    fields = Fields(str(path), values)
    if not _is_eagle3(values):
        raise ConfigError(
            f"{name} is of another kind: architectures of its config.json must name an Eagle3 model, or "
            "draft_vocab_size be given"
        )
    eagle = fields.section("eagle_config")
    for key in NORMS:
        if values.get(key) or eagle.raw(key):
            raise ConfigError(f"{name} is of another kind: {key} is not supported")
    if values.get("num_hidden_layers") != 1:
        raise ConfigError(f"{name} must have one layer: num_hidden_layers is {values.get('num_hidden_layers')}")
    for key, own, theirs in (
        ("vocab_size", values.get("vocab_size"), served.vocab_size),
        ("hidden_size", values.get("target_hidden_size") or values.get("hidden_size"), served.hidden_size),
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
    layers = _feature_layers(fields, eagle, served.num_layers, name)
    before = eagle.raw("norm_before_residual") or values.get("norm_before_residual")
    return Eagle3Config(folder, model, layers, norm_before_residual=bool(before))


def _is_eagle3(values: dict[str, Any]) -> bool:
    if "speculators_model_type" in values:
        return bool(values["speculators_model_type"] == "eagle3")
    listed = values.get("architectures")
    names = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    return any("eagle3" in each.lower() for each in names) or values.get("draft_vocab_size") is not None


def _feature_layers(fields: Fields, eagle: Fields, count: int, name: str) -> tuple[int, ...]:
    """Ascending. The file names layers by their inputs, as vLLM does, or in `eagle_config` by their outputs, as SGLang.

    Raises: ConfigError.
    """
    listed, first = fields.raw(LAYER_IDS), 0
    if listed is None:
        listed, first = eagle.raw(LAYER_IDS), 1
    if listed is None:
        return tuple(sorted((min(2, count - 1), count // 2, max(count - 3, 0))))
    if (
        isinstance(listed, list)
        and len(listed) == NUM_FEATURES
        and all(layer in range(count - first) for layer in listed)
    ):
        return tuple(sorted(layer + first for layer in listed))
    raise ConfigError(f"{name}: {LAYER_IDS} must be {NUM_FEATURES} of the {count} layers")
