"""config.json and generation_config.json -> ModelConfig, with every number checked.

The files are untrusted input: nothing in them is ever imported or run (`auto_map` is ignored).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import Fields, is_integer, read_json_object, shown
from tessera.engine.models.registry import ARCHITECTURES, Architecture
from tessera.engine.models.rope import MAX_POSITIONS, RopeConfig, longest_context, parse_rope
from tessera.engine.tensor import bfloat16, float16, float32

MAX_VOCAB = 2**22
MAX_HIDDEN = 2**17
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_INTERMEDIATE = 2**20
MAX_PARAMETERS = 10**13
MAX_EOS_TOKEN_IDS = 64
MAX_TOKEN_TYPES = 1024
MAX_ENCODER_HEAD_DIM = 128
MAX_MATRYOSHKA = 64

Activation = Literal["silu_mul", "gelu_tanh", "gelu_erf"]

DTYPES = {"float32": float32, "float16": float16, "bfloat16": bfloat16}
GELU: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}
SILU: dict[str, Activation] = {"silu": "silu_mul", "swish": "silu_mul"}


@dataclass(frozen=True)
class LayerConfig:
    """In what layers differ: RoPE or none, sliding window in tokens or None, factor of q k^T."""

    rope: bool
    sliding_window: int | None
    attention_scale: float


@dataclass(frozen=True)
class ModelConfig:
    """What the one decoder forward, and the one encoder forward, need to know of a model.

    Attributes:
        architecture: its name in config.json and in the table of architectures.
        gated_mlp: the up projection yields gate and up, else up alone.
        qk_norm: RMSNorm over each head of queries and keys before RoPE.
        rope: rotary embedding, None with learned positions.
        learned_positions: a table of max_position_embeddings rows is added to the token embedding.
        max_position_embeddings: context length that the model states.
        eos_token_ids: of config.json and generation_config.json together, ascending.
        torch_dtype: of the checkpoint; None where config.json does not say.
        num_token_types: rows of an encoder's table of token types; 0 in a decoder.
        matryoshka_dimensions: lengths to which the model's embeddings may be cut; None if to none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig | None
    learned_positions: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: np.dtype[Any] | None
    num_token_types: int = 0
    matryoshka_dimensions: tuple[int, ...] | None = None

    @property
    def is_encoder(self) -> bool:
        return self.num_token_types > 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def up_size(self) -> int:
        """Rows of the up projection: gate and up together where the MLP is gated."""
        return self.intermediate_size * (2 if self.gated_mlp else 1)

    @property
    def longest_context(self) -> int:
        """Most positions that make sense: the learned ones, or as far as RoPE scaling reaches."""
        if self.rope is None:
            return self.max_position_embeddings
        return longest_context(self.rope, self.max_position_embeddings)


def load_config(folder: Path) -> ModelConfig:
    """ModelConfig of a Hugging Face model folder.

    Raises: ModelError naming the file and the key at fault, or the architecture and those supported.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a model folder with config.json and *.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give a model folder in Hugging Face format")
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    return parse_config(read_json_object(path), generation, str(path), str(generation_path))


def parse_config(
    values: dict[str, Any],
    generation: dict[str, Any],
    source: str = "config.json",
    generation_source: str = "generation_config.json",
) -> ModelConfig:
    """See `load_config`; `values` and `generation` are the files' objects."""
    name = _architecture_name(values, source)
    architecture = ARCHITECTURES[name]
    config = Fields(source, values, architecture.defaults)
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            raise ModelError(f"{source}: quantised checkpoints ({key}) are not supported; use an unquantised one")
    if config.raw("add_cross_attention"):
        config.refuse("add_cross_attention", "false: only decoders without an encoder are supported")

    def size(key: str, high: int) -> int:
        return config.integer(architecture.key(key), 1, high)

    vocab_size = size("vocab_size", MAX_VOCAB)
    hidden_size = size("hidden_size", MAX_HIDDEN)
    num_layers = size("num_hidden_layers", MAX_LAYERS)
    num_heads = size("num_attention_heads", MAX_HEADS)
    head_dim = _head_dim(config, hidden_size, num_heads)
    num_kv_heads = num_heads
    if not architecture.learned_positions and config.has("num_key_value_heads"):
        num_kv_heads = size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        config.refuse("num_key_value_heads", f"a divisor of the number of attention heads ({num_heads})")
    inner = architecture.key("intermediate_size")
    optional_inner = architecture.learned_positions and not config.has(inner)
    max_positions = size("max_position_embeddings", MAX_POSITIONS)
    if architecture.encoder:
        _check_encoder(config, head_dim)
    rope_layers = architecture.rope_layers(config, num_layers)
    windows = architecture.windows(config, rope_layers)
    result = ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=4 * hidden_size if optional_inner else config.integer(inner, 1, MAX_INTERMEDIATE),
        layers=tuple(
            LayerConfig(rope, window, _attention_scale(config, head_dim, layer))
            for layer, (rope, window) in enumerate(zip(rope_layers, windows, strict=True))
        ),
        norm=architecture.norm,
        norm_eps=config.number(architecture.key("rms_norm_eps"), 1e-12, 1.0),
        activation=config.choice(architecture.key("hidden_act"), SILU if architecture.gated else GELU),
        gated_mlp=architecture.gated,
        qkv_bias=architecture.flag(config, architecture.qkv_bias),
        out_bias=architecture.flag(config, architecture.out_bias),
        mlp_bias=architecture.flag(config, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        rope=_rope(config, architecture, head_dim, max_positions),
        learned_positions=architecture.learned_positions,
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        max_position_embeddings=max_positions,
        eos_token_ids=_eos_token_ids(config, Fields(generation_source, generation), vocab_size),
        bos_token_id=_bos_token_id(config, vocab_size),
        torch_dtype=_torch_dtype(config),
        num_token_types=size("type_vocab_size", MAX_TOKEN_TYPES) if architecture.encoder else 0,
        matryoshka_dimensions=_matryoshka_dimensions(config, hidden_size),
    )
    _check_size(result, source)
    return result


def _architecture_name(values: dict[str, Any], source: str) -> str:
    listed = values.get("architectures")
    supported = ", ".join(sorted(ARCHITECTURES))
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        raise ModelError(f"{source}: architectures must name the model's architecture, one of {supported}")
    name = listed[0]
    if name not in ARCHITECTURES:
        raise ModelError(f"{source}: the architecture {shown(name)} is not supported; supported are {supported}")
    return name


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if config.has("head_dim"):
        return config.integer("head_dim", 1, MAX_HEAD_DIM)
    if hidden_size % num_heads:
        raise ModelError(f"{config.source}: hidden size {hidden_size} is not a multiple of {num_heads} attention heads")
    if hidden_size // num_heads > MAX_HEAD_DIM:
        raise ModelError(f"{config.source}: heads of {hidden_size // num_heads} elements are not supported")
    return hidden_size // num_heads


def _attention_scale(config: Fields, head_dim: int, layer: int) -> float:
    """1 / sqrt(head_dim), and GPT-2's two switches that change it."""
    scale = 1.0 if config.raw("scale_attn_weights") is False else 1.0 / math.sqrt(head_dim)
    return scale / (layer + 1) if config.raw("scale_attn_by_inverse_layer_idx") is True else scale


def _rope(config: Fields, architecture: Architecture, head_dim: int, max_positions: int) -> RopeConfig | None:
    if architecture.learned_positions:
        return None
    return parse_rope(config, head_dim, max_positions, architecture.rope_aliases)


def _eos_token_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    found: set[int] = set()
    for fields in (config, generation):
        value = fields.raw("eos_token_id")
        if value is None:
            continue
        token_ids = value if isinstance(value, list) else [value]
        # Some published files end with ids of -1 or beyond the vocabulary: such an id can never be chosen.
        if len(token_ids) > MAX_EOS_TOKEN_IDS or not all(map(is_integer, token_ids)):
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
    dtype: np.dtype[Any] = config.choice(key, DTYPES)
    return dtype


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
    layer = config.hidden_size * (config.qkv_size + config.q_size + config.up_size + config.intermediate_size)
    total = config.num_layers * layer + 2 * config.vocab_size * config.hidden_size
    if total > MAX_PARAMETERS:
        raise ModelError(
            f"{source}: its sizes make {total:.1e} parameters, more than the {MAX_PARAMETERS:.0e} accepted"
        )
