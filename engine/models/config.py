"""config.json and generation_config.json -> ModelConfig, with every number checked.

The files are untrusted input: nothing in them is ever imported or run (`auto_map` is ignored).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.model import open_gguf
from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.classifier import parse_classifier
from tessera.engine.models.consolidated.params import PARAMS_FILE, is_consolidated, read_params
from tessera.engine.models.fields import Fields, is_integer, read_json_object, shown
from tessera.engine.models.gguf.config import read_config
from tessera.engine.models.layers import multiplier, parse_layers, soft_cap
from tessera.engine.models.quantised.methods import EXPERTS_METHOD, quantisation_of_config, read_quantisation
from tessera.engine.models.quantised.rules import Quantisation
from tessera.engine.models.registry import ARCHITECTURES, Architecture, architecture_name, supported_names
from tessera.engine.models.registry.predictor import NUM_PREDICTORS
from tessera.engine.models.rope import MAX_POSITIONS, RopeConfig, longest_context, parse_rope
from tessera.engine.models.specs import ClassifierSpec, LayerSpec, MoESpec, NormSpec
from tessera.engine.models.text_part import text_part
from tessera.engine.ops.interface import RareOp
from tessera.engine.tensor import bfloat16, float16, float32

MAX_VOCAB = 2**22
MAX_HIDDEN = 2**17
MAX_PARAMETERS = 10**13
MAX_EOS_TOKEN_IDS = 64
MAX_TOKEN_TYPES = 1024
MAX_ENCODER_HEAD_DIM = 128
MAX_MATRYOSHKA = 64
MAX_PREDICTORS = 64

DTYPES = {"float32": float32, "float16": float16, "bfloat16": bfloat16}
# As people write them in config.json; a checkpoint in float64 is computed in float32, and `auto` says nothing.
DTYPE_NAMES: dict[str, np.dtype[Any] | None] = {
    **DTYPES,
    "float": float32,
    "half": float16,
    "float64": float32,
    "double": float32,
    "auto": None,
}

logger = logging.getLogger("tessera.engine.models")


@dataclass(frozen=True)
class ModelConfig:
    """What the one decoder forward, and the one encoder forward, need to know of a model.

    Attributes:
        architecture: its name in config.json and in the table of architectures.
        layers: specification of each.
        is_encoder: tokens see both sides of their text.
        final_norm: of the last layer's output; None in an encoder that normalises sums.
        embedding_norm: of the sum of all embeddings; None in a decoder.
        ropes: rotary embeddings that layers refer to by index; none with learned positions.
        learned_positions: a table of position embeddings is added to the token embedding.
        first_position: row of that table for the first token; those before it serve padding.
        embedding_multiplier, logits_multiplier: of the token embedding, and of the head's product.
        embedding_rounded: that multiplier is rounded to the dtype of the embeddings.
        head_bias: of the head, where it is not tied.
        head_normalised: its rows are scaled to length 1.
        logits_soft_cap: logits pass cap * tanh(logits / cap) after their multiplier.
        max_position_embeddings: context length that the model states.
        eos_token_ids: of config.json and generation_config.json together, ascending.
        torch_dtype: of the checkpoint; None where config.json does not say.
        num_predictors: layers of multi-token prediction in the checkpoint, by config.json.
        num_token_types: rows of the table of token types; 0 where there is none.
        mxfp4_experts: the checkpoint has the weights of experts in MXFP4.
        classifier: head for sequence classification, which then is the only one.
        matryoshka_dimensions: lengths to which the model's embeddings may be cut; None if to none.
        is_text_part: it is the language model in a folder of a multimodal one.
        quantisation: of the checkpoint's weights; None where they are in 16 or 32 bits, or in a GGUF file.
        notes: what of the files was left out, a sentence each.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    embedding_norm: NormSpec | None
    ropes: tuple[RopeConfig, ...]
    learned_positions: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: np.dtype[Any] | None
    embedding_multiplier: float = 1.0
    embedding_rounded: bool = False
    head_bias: bool = False
    head_normalised: bool = False
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    is_encoder: bool = False
    first_position: int = 0
    num_predictors: int = 0
    num_token_types: int = 0
    mxfp4_experts: bool = False
    classifier: ClassifierSpec | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None
    is_text_part: bool = False
    quantisation: Quantisation | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Most query heads of a layer."""
        return max(layer.attention.num_heads for layer in self.layers)

    @property
    def head_dims(self) -> frozenset[int]:
        """Of all layers."""
        return frozenset(layer.attention.head_dim for layer in self.layers)

    @property
    def rare_ops(self) -> frozenset[RareOp]:
        """Operations of its layers that few models have."""
        attentions, mlps = (layer.attention for layer in self.layers), [layer.mlp for layer in self.layers]
        found: set[RareOp] = {"relu"} if any(mlp.activation in ("relu", "relu2") for mlp in mlps) else set()
        if any(layer.adds_norm(half.norms) for layer in self.layers for half in (layer.attention, layer.mlp)):
            found.add("rmsnorm_add")
        for attention in attentions:
            if attention.soft_cap is not None:
                found.add("soft_cap")
            if attention.sinks:
                found.add("sinks")
            if attention.qk_norm is not None and attention.qk_norm_form in ("width", "each_head"):
                found.add("norm_columns")
            if attention.qk_norm is not None and attention.qk_norm_form == "rotated_head":
                found.add("rotate")
        return frozenset(found)

    @property
    def longest_context(self) -> int:
        """Most positions that make sense: the learned ones, or as far as RoPE scaling reaches."""
        longest = (longest_context(rope, self.max_position_embeddings) for rope in self.ropes)
        return min(longest, default=self.max_position_embeddings)

    @property
    def usual_context(self) -> int:
        """Context length without `--max-model-len`: the one that the model states, which YaRN's does not include."""
        extended = any(rope.kind == "yarn" for rope in self.ropes)
        return self.longest_context if extended else self.max_position_embeddings


METHODS_OF_MIXTURES = ("compressed-tensors", "fp8", "ModelOpt FP8", "AWQ", "GPTQ")


def load_config(folder: Path) -> ModelConfig:
    """ModelConfig of a model folder in Hugging Face's or Mistral's form, or of a GGUF file; its notes are logged.

    Raises: ModelError naming the file and the key at fault, or the architecture and those supported.
    """
    config = read_model_config(folder)
    for note in config.notes:
        logger.warning("%s", note)
    return config


def read_model_config(folder: Path) -> ModelConfig:
    """As `load_config`, without a log."""
    if is_gguf(folder):
        return parse_config(read_config(open_gguf(folder)), {}, str(folder))
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a model folder with config.json and *.safetensors")
    path = folder / "config.json"
    notes: list[str] = []
    if is_consolidated(folder):
        config = parse_config(read_params(folder, notes), {}, str(folder / PARAMS_FILE))
        return replace(config, notes=(*notes, *config.notes))
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give a model folder in Hugging Face format")
    values = _with_activation(folder, read_json_object(path, notes))
    quantisation = read_quantisation(folder, values)
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path, notes) if generation_path.is_file() else {}
    text = text_part(values)
    if text is None:
        config = parse_config(values, generation, str(path), str(generation_path))
    else:
        config = parse_config(text, generation, str(path), str(generation_path))
        notes.append(f"{folder} is a {values['architectures'][0]}: its language model is served, for text alone")
    notes = [*notes, *config.notes]
    _check_experts(config.layers, quantisation, str(folder))
    return replace(config, is_text_part=text is not None, quantisation=quantisation, notes=tuple(notes))


def _with_activation(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """config.json with the activation that newer versions of sentence-transformers leave in a file of their own."""
    path = folder / "config_sentence_transformers.json"
    found = read_json_object(path).get("activation_fn") if path.is_file() else None
    own = values.get("sentence_transformers")
    if found is None or not isinstance(own, dict | None):
        return values
    return {**values, "sentence_transformers": {**(own or {}), "activation_fn": found}}


def parse_config(
    values: dict[str, Any],
    generation: dict[str, Any],
    source: str = "config.json",
    generation_source: str = "generation_config.json",
) -> ModelConfig:
    """See `load_config`; `values` and `generation` are the files' objects."""
    name, class_name = _architecture_name(values, source)
    architecture = ARCHITECTURES[name]
    notes: list[str] = []
    for alias, key in architecture.aliases.items():
        if values.get(key) is None and values.get(alias) is not None:
            values = {**values, key: values[alias]}
    config = Fields(source, {**architecture.defaults_if_absent, **values}, architecture.defaults, notes)
    for key, rule in architecture.derived.items():
        if not config.has(key):
            config.values[key] = rule(config)
    for key, reason in architecture.refused.items():
        if config.raw(key):
            config.refuse(key, f"false: {reason}")
    if config.raw("is_causal") is False and not architecture.encoder:
        config.refuse("is_causal", "true: a decoder's tokens see those before them alone")
    for key, rule in architecture.required.items():
        if config.has(key) and config.raw(key) != rule(config):
            config.refuse(key, shown(rule(config)))

    def size(key: str, high: int) -> int:
        return config.integer(architecture.key(key), 1, high)

    vocab_size = size("vocab_size", MAX_VOCAB)
    hidden_size = size("hidden_size", MAX_HIDDEN)
    max_positions = size("max_position_embeddings", MAX_POSITIONS)
    first_position = architecture.first_position(config)
    if first_position >= max_positions:
        raise ModelError(f"{source}: positions begin at {first_position}, but there are only {max_positions}")
    norm_bias = architecture.norm_bias
    norm = NormSpec(
        architecture.norm,
        config.number(architecture.key("rms_norm_eps"), 1e-12, 1.0),
        bias=architecture.norm == "layernorm"
        and (config.boolean(norm_bias) if isinstance(norm_bias, str) else norm_bias),
    )
    layers = parse_layers(config, architecture, norm, hidden_size)
    head_dim = layers[0].attention.head_dim
    if architecture.encoder:
        _check_encoder(config, architecture, head_dim)
    result = ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        is_encoder=architecture.encoder,
        final_norm=None if architecture.encoder and "before" not in architecture.norm_places else norm,
        embedding_norm=norm if architecture.encoder else None,
        ropes=_ropes(config, architecture, head_dim, max_positions),
        learned_positions=architecture.learned_positions,
        first_position=first_position,
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        max_position_embeddings=max_positions - first_position,
        eos_token_ids=_eos_token_ids(config, Fields(generation_source, generation, None, notes), vocab_size),
        bos_token_id=_bos_token_id(config, vocab_size),
        torch_dtype=_torch_dtype(config),
        embedding_multiplier=multiplier(config, architecture.embedding_multiplier),
        embedding_rounded=architecture.embedding_rounded,
        head_bias=config.boolean(bias) if isinstance(bias := architecture.head_bias, str) else bias,
        head_normalised=architecture.normalised_head is not None and config.boolean(architecture.normalised_head),
        logits_multiplier=1.0 / multiplier(config, architecture.logits_divisor),
        logits_soft_cap=soft_cap(config, architecture.logits_soft_cap),
        num_predictors=_num_predictors(config, architecture),
        num_token_types=size("type_vocab_size", MAX_TOKEN_TYPES) if architecture.token_types else 0,
        classifier=parse_classifier(config, architecture, class_name, norm),
        mxfp4_experts=config.section("quantization_config").raw("quant_method") == EXPERTS_METHOD,
        matryoshka_dimensions=_matryoshka_dimensions(config, hidden_size),
        quantisation=quantisation_of_config(values, source),
    )
    _check_size(result, source)
    _check_experts(layers, result.quantisation, source)
    return replace(result, notes=tuple(notes))


def _num_predictors(config: Fields, architecture: Architecture) -> int:
    if architecture.predictor is None or not config.has(NUM_PREDICTORS):
        return 0
    return config.integer(NUM_PREDICTORS, 0, MAX_PREDICTORS)


def _ropes(config: Fields, architecture: Architecture, head_dim: int, max_positions: int) -> tuple[RopeConfig, ...]:
    """One, or that of layers without a window and that of layers with one."""
    if architecture.learned_positions:
        return ()
    if architecture.window_rope is None:
        return (parse_rope(config, head_dim, max_positions, architecture.rope_aliases),)
    found = []
    for section, key, scaled in architecture.window_rope:
        own = config.section("rope_parameters").section(section).values
        scaling = config.section("rope_scaling").values if scaled else {}
        values = {"rope_theta": config.raw(key), "rope_parameters": {**scaling, **own}}
        fields = Fields(config.source, values, None, config.notes)
        found.append(parse_rope(fields, head_dim, max_positions, architecture.rope_aliases))
    return tuple(found)


def _architecture_name(values: dict[str, Any], source: str) -> tuple[str, str | None]:
    """The entry of the table for the first class of `architectures`, and that class; for model_type where that names
    none."""
    listed = values.get("architectures")
    supported = supported_names()
    if listed is not None and (not isinstance(listed, list) or not all(isinstance(name, str) for name in listed)):
        raise ModelError(f"{source}: architectures must name the model's architecture, one of {supported}")
    model_type = values.get("model_type")
    class_name = listed[0] if listed else None
    found = architecture_name(class_name, model_type)
    if found is not None:
        return found, class_name
    if listed:
        raise ModelError(f"{source}: the architecture {shown(listed[0])} is not supported; supported are {supported}")
    raise ModelError(
        f"{source}: architectures must name the model's architecture, one of {supported}; it is missing, and "
        f"model_type {shown(model_type)} is none of theirs"
    )


def _eos_token_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    found: set[int] = set()
    for fields in (config, generation):
        value = fields.raw("eos_token_id")
        if value is None:
            continue
        token_ids = value if isinstance(value, list) else [value]
        # Some published files end with ids of -1 or beyond the vocabulary: such an id can never be chosen.
        if len(token_ids) > MAX_EOS_TOKEN_IDS or not all(map(is_integer, token_ids)):
            if fields is generation:
                fields.notes.append(f"{fields.source}: eos_token_id {shown(value)} is left out: it must be token ids")
                continue
            fields.refuse("eos_token_id", f"a token id or a list of at most {MAX_EOS_TOKEN_IDS}")
        found.update(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
    if len(found) > MAX_EOS_TOKEN_IDS:
        raise ModelError(f"{generation.source}: more than {MAX_EOS_TOKEN_IDS} eos_token_ids together with config.json")
    return tuple(sorted(found))


def _bos_token_id(config: Fields, vocab_size: int) -> int | None:
    value = config.raw("bos_token_id")
    return value if is_integer(value) and 0 <= value < vocab_size else None


def _torch_dtype(config: Fields) -> np.dtype[Any] | None:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(key):
        return None
    value = config.raw(key)
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(name, str) or name not in DTYPE_NAMES:
        config.refuse(key, f"one of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def _check_encoder(config: Fields, architecture: Architecture, head_dim: int) -> None:
    if architecture.learned_positions and config.raw("position_embedding_type") != "absolute":
        config.refuse("position_embedding_type", '"absolute"')
    if head_dim > MAX_ENCODER_HEAD_DIM:
        raise ModelError(f"{config.source}: an encoder's heads have at most {MAX_ENCODER_HEAD_DIM} elements")


def _matryoshka_dimensions(config: Fields, hidden_size: int) -> tuple[int, ...] | None:
    """Those listed, or all where config.json says `is_matryoshka` alone."""
    if config.has("matryoshka_dimensions"):
        listed = config.raw("matryoshka_dimensions")
        fits = isinstance(listed, list) and 0 < len(listed) <= MAX_MATRYOSHKA and all(map(is_integer, listed))
        if not fits or not all(0 < dimension <= hidden_size for dimension in listed):
            config.refuse("matryoshka_dimensions", f"a list of integers from 1 to {hidden_size}")
        return tuple(sorted({*listed, hidden_size}))
    return tuple(range(1, hidden_size + 1)) if config.raw("is_matryoshka") is True else None


def _check_experts(layers: tuple[LayerSpec, ...], quantisation: Quantisation | None, source: str) -> None:
    if quantisation is None or quantisation.method in METHODS_OF_MIXTURES:
        return
    if any(isinstance(layer.mlp, MoESpec) for layer in layers):
        raise ModelError(
            f"{source}: mixtures of experts quantised by {quantisation.method} are not supported; supported are "
            f"{', '.join(METHODS_OF_MIXTURES)}, MXFP4 as gpt-oss has it, and GGUF"
        )


def _check_size(config: ModelConfig, source: str) -> None:
    widths = (
        attention.qkv_size + attention.q_size + (mlp.up_size + mlp.inner_size) * getattr(mlp, "num_experts", 1)
        for attention, mlp in ((layer.attention, layer.mlp) for layer in config.layers)
    )
    total = config.hidden_size * (sum(widths) + 2 * config.vocab_size)
    if total > MAX_PARAMETERS:
        raise ModelError(
            f"{source}: its sizes make {total:.1e} parameters, more than the {MAX_PARAMETERS:.0e} accepted"
        )
