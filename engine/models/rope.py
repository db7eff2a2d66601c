"""Rotary position embedding: what config.json says about it, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import Fields, shown
from tessera.engine.tensor import Device, Tensor, from_numpy

Float64Array = np.ndarray[Any, np.dtype[np.float64]]
Float32Array = np.ndarray[Any, np.dtype[np.float32]]

MAX_POSITIONS = 2**27
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
TABLE_CHUNK = 16384


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model, every value resolved.

    Attributes:
        kind: one of ROPE_KINDS.
        theta: base of the geometric series of wavelengths.
        rotary_dim: elements of a head that are rotated, its first ones.
        factor: how many times longer than trained the context may become; 1 for `default`.
        original_max_len: context length in training.
        attention_factor: multiplies cosines and sines, and so the attention scores by its square.
        low_freq_factor, high_freq_factor: llama3 only.
        beta_fast, beta_slow, truncate: yarn only.
        short_factor, long_factor: longrope only, one per rotary pair.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_max_len: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = field(default=(), repr=False)
    long_factor: tuple[float, ...] = field(default=(), repr=False)

    @property
    def depends_on_length(self) -> bool:
        """Whether sequences beyond `original_max_len` have other frequencies."""
        return self.kind == "dynamic" or (self.kind == "longrope" and self.short_factor != self.long_factor)


def parse_rope(config: Fields, head_dim: int, max_positions: int, aliases: dict[str, str]) -> RopeConfig:
    """RopeConfig from config.json's rope_parameters, or from rope_scaling and rope_theta.

    Raises: ModelError naming the key at fault.
    """
    key = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    given = config.section(key).values
    nested = next((name for name, value in given.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise ModelError(f"{config.source}: {key} per layer type ({shown(nested)}) is not supported")
    # A file may keep these beside the section or in it; a trained length beside it takes precedence.
    trained = "original_max_position_embeddings"
    defaults = {
        "rope_theta": config.raw("rope_theta"),
        "partial_rotary_factor": config.raw("partial_rotary_factor") or 1.0,
        "rope_type": given.get("type") or "default",
        trained: config.raw(trained) or max_positions,
    }
    if config.values.get(trained) is not None:
        given = {**given, trained: config.values[trained]}
    section = Fields(f"{config.source}: {key}", given, defaults)
    kind = section.choice("rope_type", {kind: kind for kind in ROPE_KINDS} | aliases)
    rotary_dim = int(head_dim * section.number("partial_rotary_factor", 1e-3, 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{config.source}: {rotary_dim} of {head_dim} head elements rotate; it must be even, at least 2"
        )
    theta = section.number("rope_theta", 1.0 + 1e-6, 1e15)
    original = section.integer(trained, 1, MAX_POSITIONS)
    parse = {
        "default": _parse_default,
        "linear": _parse_factor,
        "dynamic": _parse_factor,
        "llama3": _parse_llama3,
        "yarn": _parse_yarn,
        "longrope": _parse_longrope,
    }[kind]
    if kind in ("default", "linear", "dynamic"):
        original = max_positions
    if kind == "dynamic" and section.has("alpha"):
        # HunYuan's fixed NTK-aware base, whatever the length.
        theta *= section.number("alpha", 1e-3, 1e6) ** (rotary_dim / max(rotary_dim - 2, 1))
        kind = "default"
    base = RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, original_max_len=original)
    return parse(section, base, max_positions)


def longest_context(rope: RopeConfig, max_positions: int) -> int:
    """Longest context that these embeddings were made for: beyond it answers lose their sense."""
    if rope.kind in ("linear", "dynamic", "yarn"):
        return max(max_positions, int(rope.original_max_len * rope.factor))
    return max_positions


def inverse_frequencies(rope: RopeConfig, max_len: int) -> Float64Array:
    """Radians per position of each rotary pair, [rotary_dim / 2], in sequences of up to `max_len` tokens."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    if rope.kind == "dynamic":
        return np.asarray(_ntk_theta(rope, max_len) ** -exponents)
    plain = rope.theta**-exponents
    if rope.kind == "linear":
        # Chen et al. 2023, "Extending context window of large language models via position interpolation"
        return np.asarray(plain / rope.factor)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "longrope":
        # Ding et al. 2024, "LongRoPE", section 3: one searched factor per pair
        factors = rope.long_factor if max_len > rope.original_max_len else rope.short_factor
        return np.asarray(plain / np.asarray(factors))
    return np.asarray(plain)


def cos_sin_table(rope: RopeConfig, max_len: int) -> Float32Array:
    """[max_len, rotary_dim] float32 for sequences of up to `max_len` tokens: cosines in the first half of a row, sines
    in the second.

    Formula: Su et al. 2021, "RoFormer", section 3.2.2, half-split pairs. Angles are rounded to
    float32 before the cosine, as in the frameworks that the models were trained with.
    """
    frequencies = inverse_frequencies(rope, max_len).astype(np.float32)
    half = rope.rotary_dim // 2
    table = np.empty((max_len, rope.rotary_dim), np.float32)
    for start in range(0, max_len, TABLE_CHUNK):
        stop = min(start + TABLE_CHUNK, max_len)
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * frequencies
        wide = angles.astype(np.float64)
        table[start:stop, :half] = np.cos(wide) * rope.attention_factor
        table[start:stop, half:] = np.sin(wide) * rope.attention_factor
    return table


def device_tables(ropes: Sequence[RopeConfig], max_len: int, device: Device) -> tuple[Tensor, ...]:
    """`cos_sin_table` of each on the device, for an encoder, which computes all texts as ones of `max_len` tokens."""
    return tuple(from_numpy(cos_sin_table(rope, max_len), device) for rope in ropes)


# -- one kind each --------------------------------------------------------------------------------


def _parse_default(section: Fields, base: RopeConfig, max_positions: int) -> RopeConfig:
    return base


def _parse_factor(section: Fields, base: RopeConfig, max_positions: int) -> RopeConfig:
    return replace(base, factor=section.number("factor", 1.0, 1e4))


def _parse_llama3(section: Fields, base: RopeConfig, max_positions: int) -> RopeConfig:
    low = section.number("low_freq_factor", 1e-3, 1e6)
    high = section.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        section.refuse("high_freq_factor", f"greater than low_freq_factor ({low:g})")
    return replace(
        base,
        factor=section.number("factor", 1.0, 1e4),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _parse_yarn(section: Fields, base: RopeConfig, max_positions: int) -> RopeConfig:
    section.defaults |= {"factor": max(max_positions / base.original_max_len, 1.0), "truncate": True}
    section.defaults |= {"beta_fast": 32.0, "beta_slow": 1.0, "attn_factor": 1.0}
    factor = section.number("factor", 1.0, 1e4)
    if section.has("attention_factor"):
        attention_factor = section.number("attention_factor", 1e-3, 1e3)
    elif section.raw("mscale") and section.raw("mscale_all_dim"):
        scale = _yarn_mscale(factor, section.number("mscale", 0.0, 1e3))
        attention_factor = scale / _yarn_mscale(factor, section.number("mscale_all_dim", 0.0, 1e3))
    else:  # the paper's code and vLLM multiply it by attn_factor
        attention_factor = _yarn_mscale(factor, 1.0) * section.number("attn_factor", 1e-3, 1e3)
    return replace(
        base,
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=section.number("beta_fast", 1e-3, 1e6),
        beta_slow=section.number("beta_slow", 1e-3, 1e6),
        truncate=section.boolean("truncate"),
    )


def _parse_longrope(section: Fields, base: RopeConfig, max_positions: int) -> RopeConfig:
    section.defaults["factor"] = max(max_positions / base.original_max_len, 1.0)
    factor = section.number("factor", 1.0, 1e4)
    pairs = base.rotary_dim // 2
    if section.has("attention_factor"):
        attention_factor = section.number("attention_factor", 1e-3, 1e3)
    elif section.has("short_mscale"):  # Phi-3.5-MoE's words
        attention_factor = section.number("short_mscale", 1e-3, 1e3)
        if section.raw("long_mscale") != section.raw("short_mscale"):
            section.refuse("long_mscale", f"that of short_mscale, {attention_factor:g}")
    elif factor > 1.0 and base.original_max_len > 1:
        # Ding et al. 2024, "LongRoPE", as released with Phi-3
        attention_factor = math.sqrt(1.0 + math.log(factor) / math.log(base.original_max_len))
    else:
        attention_factor = 1.0
    return replace(
        base,
        factor=factor,
        attention_factor=attention_factor,
        short_factor=section.numbers("short_factor", pairs, 1e-6, 1e6),
        long_factor=section.numbers("long_factor", pairs, 1e-6, 1e6),
    )


def _ntk_theta(rope: RopeConfig, max_len: int) -> float:
    """NTK-aware base (Peng et al. 2023, "YaRN", section 3.1 and appendix on dynamic scaling)."""
    if rope.rotary_dim <= 2 or max_len <= rope.original_max_len:
        return rope.theta
    stretch = rope.factor * max_len / rope.original_max_len - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(plain: Float64Array, rope: RopeConfig) -> Float64Array:
    """Llama 3.1's rule (Grattafiori et al. 2024 and its reference code): long waves are divided by
    `factor`, short ones kept, those between interpolated by how often they fit the old context."""
    turns = rope.original_max_len * plain / (2.0 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray((1.0 - smooth) * plain / rope.factor + smooth * plain)


def _yarn(plain: Float64Array, rope: RopeConfig) -> Float64Array:
    """NTK-by-parts (Peng et al. 2023, "YaRN", section 3.2): pairs that turn more than beta_fast times
    within the old context are kept, those under beta_slow divided by `factor`, a ramp between."""

    def pair_turning(times: float) -> float:
        wavelength = rope.original_max_len / (times * 2.0 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2.0 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain / rope.factor * ramp + plain * (1.0 - ramp))


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Attention temperature (Peng et al. 2023, "YaRN", equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
