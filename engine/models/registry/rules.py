"""Rules by which config.json says which layers rotate, and which have a sliding window."""

from __future__ import annotations

from tessera.engine.models.fields import Fields

MAX_WINDOW = 2**27


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
    if not config.boolean("use_sliding_window"):
        return (None,) * len(rope_layers)
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
    windows = exaone4_windows(config, (True,) * num_layers)
    return tuple(window is not None or not config.has("sliding_window") for window in windows)


def exaone4_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """All layers but every sliding_window_pattern-th, unless layer_types says which."""
    if not config.has("sliding_window"):
        return (None,) * len(rope_layers)
    pattern = config.integer("sliding_window_pattern", 1, 2**31)
    return _by_layer_types(config, tuple((layer + 1) % pattern != 0 for layer in range(len(rope_layers))))


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
