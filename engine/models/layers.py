"""config.json and an entry of the table of architectures -> the specification of each layer."""

from __future__ import annotations

import math

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import Fields
from tessera.engine.models.registry import Architecture
from tessera.engine.models.specs import AttentionSpec, HalfNorms, LayerSpec, MLPSpec, NormSpec
from tessera.engine.ops.linear_interface import Activation

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_INTERMEDIATE = 2**20
MAX_MULTIPLIER = 1e6

PLAIN: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "relu": "relu",
    "relu2": "relu2",
}
GATED: dict[str, Activation] = {
    "silu": "silu_mul",
    "swish": "silu_mul",
    "swiglu": "silu_mul",
    "gelu_new": "gelu_tanh_mul",
    "gelu_pytorch_tanh": "gelu_tanh_mul",
    "gelu": "gelu_erf_mul",
}


def parse_layers(config: Fields, architecture: Architecture, norm: NormSpec, hidden_size: int) -> tuple[LayerSpec, ...]:
    """Raises: ModelError naming the key at fault."""

    def size(key: str, high: int) -> int:
        return config.integer(architecture.key(key), 1, high)

    def flag(value: bool | str) -> bool:
        return config.boolean(value) if isinstance(value, str) else value

    num_layers = size("num_hidden_layers", MAX_LAYERS)
    num_heads = size("num_attention_heads", MAX_HEADS)
    head_dim = _head_dim(config, hidden_size, num_heads)
    num_kv_heads = num_heads
    kv_key = architecture.key("num_key_value_heads")
    may_group = kv_key in architecture.derived or not (architecture.learned_positions or architecture.encoder)
    if may_group and config.has(kv_key):
        num_kv_heads = size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        config.refuse(kv_key, f"a divisor of the number of attention heads ({num_heads})")
    norms = HalfNorms(**dict.fromkeys(architecture.norm_places, norm))
    parallel = flag(architecture.parallel)
    mlp = MLPSpec(
        inner_size=_inner_size(config, architecture, hidden_size),
        activation=config.choice(architecture.key("hidden_act"), GATED if architecture.gated else PLAIN),
        norms=HalfNorms() if parallel and not flag(architecture.parallel_norms) else norms,
        up_bias=flag(architecture.mlp_bias),
        down_bias=flag(architecture.mlp_bias),
    )
    rope_layers = architecture.rope_layers(config, num_layers)
    windows = architecture.windows(config, rope_layers)
    attentions = (
        AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=_attention_scale(config, architecture, head_dim, layer),
            norms=HalfNorms() if architecture.bare_start and layer == 0 else norms,
            rope=(0 if window is None or architecture.window_rope is None else 1) if rotates else None,
            sliding_window=window,
            soft_cap=soft_cap(config, architecture.attention_soft_cap),
            qk_norm=_qk_norm(architecture, norm) if flag(architecture.qk_norm) else None,
            qk_norm_form=architecture.qk_norm_form,
            qkv_bias=flag(architecture.qkv_bias),
            out_bias=flag(architecture.out_bias),
        )
        for layer, (rotates, window) in enumerate(zip(rope_layers, windows, strict=True))
    )
    residual_multiplier = multiplier(config, architecture.residual_multiplier)
    return tuple(LayerSpec(attention, mlp, parallel, residual_multiplier) for attention in attentions)


def multiplier(config: Fields, key: str | None) -> float:
    """The number at `key`, 1 without a key."""
    return 1.0 if key is None else config.number(key, 1 / MAX_MULTIPLIER, MAX_MULTIPLIER)


def soft_cap(config: Fields, key: str | None) -> float | None:
    """The number at `key`, None without one."""
    if key is None or not config.has(key):
        return None
    return config.number(key, 1 / MAX_MULTIPLIER, MAX_MULTIPLIER)


def _qk_norm(architecture: Architecture, norm: NormSpec) -> NormSpec:
    """An RMSNorm where all heads share its weight, else of the kind of all norms."""
    shared = architecture.qk_norm_form in ("head", "rotated_head")
    return NormSpec("rmsnorm" if shared else architecture.norm, norm.eps)


def _inner_size(config: Fields, architecture: Architecture, hidden_size: int) -> int:
    """GPT-2 need not say it."""
    key = architecture.key("intermediate_size")
    if architecture.learned_positions and not config.has(key):
        return 4 * hidden_size
    return config.integer(key, 1, MAX_INTERMEDIATE)


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if config.has("head_dim"):
        return config.integer("head_dim", 1, MAX_HEAD_DIM)
    if hidden_size % num_heads:
        raise ModelError(f"{config.source}: hidden size {hidden_size} is not a multiple of {num_heads} attention heads")
    if hidden_size // num_heads > MAX_HEAD_DIM:
        raise ModelError(f"{config.source}: heads of {hidden_size // num_heads} elements are not supported")
    return hidden_size // num_heads


def _attention_scale(config: Fields, architecture: Architecture, head_dim: int, layer: int) -> float:
    """1 / sqrt(head_dim) or the number that config.json gives, and GPT-2's two switches that change it."""
    if architecture.attention_multiplier is not None:
        return multiplier(config, architecture.attention_multiplier)
    scale = 1.0 if config.raw("scale_attn_weights") is False else 1.0 / math.sqrt(head_dim)
    return scale / (layer + 1) if config.raw("scale_attn_by_inverse_layer_idx") is True else scale
