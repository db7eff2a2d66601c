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
from tessera.engine.models.fields import Fields, is_integer, read_json_object, shown
from tessera.engine.models.gguf.config import read_config
from tessera.engine.models.layers import multiplier, parse_layers
from tessera.engine.models.quantised import quantisation_in_config, quantisation_named
from tessera.engine.models.registry import ARCHITECTURES, architecture_name
from tessera.engine.models.rope import MAX_POSITIONS, RopeConfig, longest_context, parse_rope
from tessera.engine.models.specs import LayerSpec, NormSpec
from tessera.engine.tensor import bfloat16, float16, float32

MAX_VOCAB = 2**22
MAX_HIDDEN = 2**17
MAX_PARAMETERS = 10**13
MAX_EOS_TOKEN_IDS = 64
MAX_TOKEN_TYPES = 1024
MAX_ENCODER_HEAD_DIM = 128
MAX_MATRYOSHKA = 64

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
        final_norm: before the head; None in an encoder.
        embedding_norm: of the sum of all embeddings; None in a decoder.
        ropes: rotary embeddings that layers refer to by index; none with learned positions.
        learned_positions: a table of max_position_embeddings rows is added to the token embedding.
        embedding_multiplier, logits_multiplier: of the token embedding, and of the head's product.
        logits_soft_cap: logits pass cap * tanh(logits / cap) after their multiplier.
        max_position_embeddings: context length that the model states.
        eos_token_ids: of config.json and generation_config.json together, ascending.
        torch_dtype: of the checkpoint; None where config.json does not say.
        num_token_types: rows of an encoder's table of token types; 0 in a decoder.
        matryoshka_dimensions: lengths to which the model's embeddings may be cut; None if to none.
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
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    num_token_types: int = 0
    matryoshka_dimensions: tuple[int, ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_encoder(self) -> bool:
        return self.num_token_types > 0

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
    def longest_context(self) -> int:
        """Most positions that make sense: the learned ones, or as far as RoPE scaling reaches."""
        longest = (longest_context(rope, self.max_position_embeddings) for rope in self.ropes)
        return min(longest, default=self.max_position_embeddings)

    @property
    def usual_context(self) -> int:
        """Context length without `--max-model-len`: the one that the model states, which YaRN's does not include."""
        extended = any(rope.kind == "yarn" for rope in self.ropes)
        return self.longest_context if extended else self.max_position_embeddings


def load_config(folder: Path) -> ModelConfig:
    """ModelConfig of a Hugging Face model folder, or of a GGUF file; its notes are logged.

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
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give a model folder in Hugging Face format")
    notes: list[str] = []
    values = read_json_object(path, notes)
    named = quantisation_named(folder, values)
    if named is not None:
        raise ModelError(f"{folder} is quantised ({named}), which is not supported; use an unquantised model or a GGUF")
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path, notes) if generation_path.is_file() else {}
    config = parse_config(values, generation, str(path), str(generation_path))
    return replace(config, notes=(*notes, *config.notes))


def parse_config(
    values: dict[str, Any],
    generation: dict[str, Any],
    source: str = "config.json",
    generation_source: str = "generation_config.json",
) -> ModelConfig:
    """See `load_config`; `values` and `generation` are the files' objects."""
    name = _architecture_name(values, source)
    architecture = ARCHITECTURES[name]
    notes: list[str] = []
    config = Fields(source, {**architecture.defaults_if_absent, **values}, architecture.defaults, notes)
    named = quantisation_in_config(values)
    if named is not None:
        raise ModelError(
            f"{source}: quantised checkpoints ({named}) are not supported; use an unquantised one or a GGUF"
        )
    for key, reason in architecture.refused.items():
        if config.raw(key):
            config.refuse(key, f"false: {reason}")

    def size(key: str, high: int) -> int:
        return config.integer(architecture.key(key), 1, high)

    vocab_size = size("vocab_size", MAX_VOCAB)
    hidden_size = size("hidden_size", MAX_HIDDEN)
    max_positions = size("max_position_embeddings", MAX_POSITIONS)
    norm = NormSpec(
        architecture.norm,
        config.number(architecture.key("rms_norm_eps"), 1e-12, 1.0),
        bias=architecture.norm == "layernorm",
    )
    layers = parse_layers(config, architecture, norm, hidden_size)
    if architecture.encoder:
        _check_encoder(config, layers[0].attention.head_dim)
    ropes: tuple[RopeConfig, ...] = ()
    if not architecture.learned_positions:
        ropes = (parse_rope(config, layers[0].attention.head_dim, max_positions, architecture.rope_aliases),)
    result = ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        final_norm=None if architecture.encoder else norm,
        embedding_norm=norm if architecture.encoder else None,
        ropes=ropes,
        learned_positions=architecture.learned_positions,
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        max_position_embeddings=max_positions,
        eos_token_ids=_eos_token_ids(config, Fields(generation_source, generation, None, notes), vocab_size),
        bos_token_id=_bos_token_id(config, vocab_size),
        torch_dtype=_torch_dtype(config),
        embedding_multiplier=multiplier(config, architecture.embedding_multiplier),
        logits_multiplier=1.0 / multiplier(config, architecture.logits_divisor),
        num_token_types=size("type_vocab_size", MAX_TOKEN_TYPES) if architecture.encoder else 0,
        matryoshka_dimensions=_matryoshka_dimensions(config, hidden_size),
    )
    _check_size(result, source)
    return replace(result, notes=tuple(notes))


def _architecture_name(values: dict[str, Any], source: str) -> str:
    """The entry of the table for the first class of `architectures`; for model_type where that names none."""
    listed = values.get("architectures")
    supported = ", ".join(sorted(ARCHITECTURES))
    if listed is not None and (not isinstance(listed, list) or not all(isinstance(name, str) for name in listed)):
        raise ModelError(f"{source}: architectures must name the model's architecture, one of {supported}")
    model_type = values.get("model_type")
    found = architecture_name(listed[0] if listed else None, model_type)
    if found is not None:
        return found
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


def _check_encoder(config: Fields, head_dim: int) -> None:
    if config.raw("position_embedding_type") != "absolute":
        config.refuse("position_embedding_type", '"absolute"')
    if config.raw("is_decoder"):
        config.refuse("is_decoder", "false: an encoder only makes embeddings")
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


def _check_size(config: ModelConfig, source: str) -> None:
    widths = (
        attention.qkv_size + attention.q_size + mlp.up_size + mlp.inner_size
        for attention, mlp in ((layer.attention, layer.mlp) for layer in config.layers)
    )
    total = config.hidden_size * (sum(widths) + 2 * config.vocab_size)
    if total > MAX_PARAMETERS:
        raise ModelError(
            f"{source}: its sizes make {total:.1e} parameters, more than the {MAX_PARAMETERS:.0e} accepted"
        )
