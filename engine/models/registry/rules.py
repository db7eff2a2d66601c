"""Rules by which config.json says which layers rotate and which have a sliding window, and keys that follow from
others."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.models.fields import Fields
from tessera.engine.models.specs import AttentionSpec

MAX_WINDOW = 2**27
MAX_NUMBER = 1e9
BAICHUAN_7B_WIDTH = 4096
BAICHUAN2_VOCAB = 125696

Rows = np.ndarray[Any, np.dtype[np.int64]]


def same_window(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    return (_window(config),) * len(rope_layers)


def same_window_if_used(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """In every layer where use_sliding_window says so."""
    return same_window(config, rope_layers) if config.boolean("use_sliding_window") else (None,) * len(rope_layers)


def alternating_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """In every other layer from the first on, unless layer_types says which."""
    return _by_layer_types(config, tuple(layer % 2 == 0 for layer in range(len(rope_layers))))


def upper_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Layers from max_window_layers on, where use_sliding_window says so."""
    return windows_above(config, rope_layers) if config.boolean("use_sliding_window") else (None,) * len(rope_layers)


def windows_above(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Layers from max_window_layers on."""
    first = config.integer("max_window_layers", 0, 2**31)
    return _by_layer_types(config, tuple(layer >= first for layer in range(len(rope_layers))))


def unrotated_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Layers without RoPE, where use_sliding_window says so."""
    if not config.boolean("use_sliding_window"):
        return (None,) * len(rope_layers)
    return _by_layer_types(config, tuple(not rope for rope in rope_layers))


def _by_layer_types(config: Fields, sliding: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The window where `sliding`, or where config.json's layer_types says so."""
    window = _window(config)
    return tuple(window if slides else None for slides in _layer_types(config, sliding))


def _layer_types(config: Fields, sliding: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers have a window: `sliding`, unless config.json's layer_types says it."""
    if not config.has("layer_types"):
        return sliding
    kinds = config.strings("layer_types", len(sliding))
    if not set(kinds) <= {"sliding_attention", "full_attention"}:
        config.refuse("layer_types", "a list of sliding_attention and full_attention")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _window(config: Fields) -> int | None:
    return config.integer("sliding_window", 1, MAX_WINDOW) if config.has("sliding_window") else None


def every_window(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """All layers unless layer_types says which."""
    return _by_layer_types(config, (True,) * len(rope_layers))


def exaone4_rope_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Layers with a window, or all where none has one."""
    windows = patterned_windows(config, (True,) * num_layers)
    return tuple(window is not None or not config.has("sliding_window") for window in windows)


def patterned_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """As sliding_window_pattern says, unless layer_types says which."""
    if not config.has("sliding_window"):
        return (None,) * len(rope_layers)
    return _by_layer_types(config, _patterned(config, len(rope_layers)))


def _patterned(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """All layers but every n-th; or EXAONE's letters, repeated, of which L stands for a layer with a window and G for
    one without."""
    key = "sliding_window_pattern"
    pattern = config.raw(key)
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= {"L", "G"}:
            config.refuse(key, "an integer, or letters L and G")
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(num_layers))
    every = config.integer(key, 1, 2**31)
    return tuple((layer + 1) % every != 0 for layer in range(num_layers))


def listed_rope_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3's no_rope_layers: 1 rotates and 0 does not, whatever the name says."""
    if config.has("no_rope_layers"):
        listed = config.raw("no_rope_layers")
        if not isinstance(listed, list) or len(listed) < num_layers or not all(flag in (0, 1) for flag in listed):
            config.refuse("no_rope_layers", f"a list of at least {num_layers} zeros and ones")
        return tuple(map(bool, listed[:num_layers]))
    interval = config.integer("no_rope_layer_interval", 1, 2**31)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def position_after_padding(config: Fields) -> int:
    """RoBERTa counts positions from pad_token_id + 1."""
    return config.integer("pad_token_id", 0, MAX_WINDOW) + 1


def modernbert_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Half of local_attention on either side, but for every global_attn_every_n_layers-th layer or as layer_types
    says."""
    every = config.integer("global_attn_every_n_layers", 1, 2**31)
    sliding = _layer_types(config, tuple(layer % every != 0 for layer in range(len(rope_layers))))
    reach = config.integer("local_attention", 1, MAX_WINDOW) // 2
    return tuple(reach if slides else None for slides in sliding)


def windowed_rope_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Layers with a window alone."""
    return tuple(window is not None for window in patterned_windows(config, (True,) * num_layers))


# -- keys that follow from others ------------------------------------------------------------------


def positive(config: Fields, key: str) -> float:
    return config.number(key, 1 / MAX_NUMBER, MAX_NUMBER)


def tanh_gelu(config: Fields) -> Any:
    """hidden_act, whose `gelu` means the tanh approximation."""
    name = config.raw("hidden_act")
    return "gelu_pytorch_tanh" if name == "gelu" else name


def rotary_share(config: Fields) -> float:
    """GPT-J's rotary_dim as a share of a head; null rotates all of it."""
    heads, width = config.integer("n_head", 1, 2**20), config.integer("n_embd", 1, 2**20)
    rotary_dim = config.integer("rotary_dim", 1, width)
    return min(rotary_dim * heads / width, 1.0)


def has_mamba(config: Fields) -> bool:
    """Whether a layer of Granite 4 is no attention; all are where config.json does not say."""
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    kinds = config.raw(key)
    return not isinstance(kinds, list) or not all(kind in ("attention", "full_attention") for kind in kinds)


def falcon_kv_heads(config: Fields) -> int:
    """One with multi_query but for the new decoder architecture, which says how many."""
    heads = config.integer("num_attention_heads", 1, 2**20)
    if not config.boolean("new_decoder_architecture"):
        return 1 if config.boolean("multi_query") else heads
    return config.integer("num_kv_heads", 1, heads) if config.has("num_kv_heads") else heads


def falcon_parallel_norms(config: Fields) -> bool:
    """The new decoder architecture has two norms unless config.json says one."""
    return config.boolean("new_decoder_architecture") and config.raw("num_ln_in_parallel_attn") != 1


def baichuan_alibi(config: Fields) -> bool:
    """Only 7B, which is 4096 wide, rotates."""
    return config.integer("hidden_size", 1, 2**20) > BAICHUAN_7B_WIDTH


def baichuan_head(config: Fields) -> bool:
    """The second generation, which its vocabulary tells, normalises the rows of its head."""
    return config.integer("vocab_size", 1, 2**31) == BAICHUAN2_VOCAB


# -- fused queries, keys and values ----------------------------------------------------------------


def by_kv_head(spec: AttentionSpec) -> Rows:
    """Each key/value head's queries, then its key and its value."""
    group = spec.num_heads // spec.num_kv_heads
    rows = np.arange(spec.qkv_size).reshape(spec.num_kv_heads, group + 2, spec.head_dim)
    return np.concatenate([part.ravel() for part in (rows[:, :group], rows[:, group], rows[:, group + 1])])


def codegen_order(spec: AttentionSpec) -> Rows:
    """Four shares of the heads, each with its queries, values and keys."""
    rows = np.arange(spec.qkv_size).reshape(4, 3, -1)
    return np.concatenate([rows[:, part].ravel() for part in (0, 2, 1)])
