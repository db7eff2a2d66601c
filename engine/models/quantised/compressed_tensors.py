"""The configuration of compressed-tensors: groups of modules and the scheme of each."""

from __future__ import annotations

from typing import Any, Literal

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import Fields, is_integer, shown
from tessera.engine.models.quantised.fp8 import Fp8Scheme
from tessera.engine.models.quantised.groups import PackedScheme
from tessera.engine.models.quantised.int8 import Int8Scheme
from tessera.engine.models.quantised.rules import Quantisation, Rule, targets
from tessera.engine.models.quantised.stored import Scheme

FORMATS = (None, "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
FOLDED = ("weight_input", "weight_output")  # places of rotations that the stored weights have in them
SUPPORTED = "FP8 (W8A8 and W8A16), W4A16, W8A16 and INT8 W8A8"


def read_compressed_tensors(config: Fields) -> Quantisation:
    """Raises: ModelError naming the scheme that is not supported, or the key at fault."""
    sparsity = config.section("sparsity_config").raw("format")
    if sparsity not in (None, "dense"):
        _refuse(config, f"the sparsity {shown(sparsity)}")
    _refuse_rotations(config)
    ignored = config.raw("ignore") or []
    if not isinstance(ignored, list):
        config.refuse("ignore", "a list")
    groups = config.section("config_groups")
    if not groups.values:
        raise ModelError(f"{config.source}: config_groups is empty")
    exact: list[Rule] = []  # a module or a pattern comes before a class
    classes: list[Rule] = []
    for name in groups.values:
        group = groups.section(name)
        listed = group.raw("targets")
        if not isinstance(listed, list):
            group.refuse("targets", "a list")
        scheme = _scheme(config, group)
        by_class = [target for target in listed if target == "Linear"]
        others = [target for target in listed if target != "Linear"]
        if others:
            exact.append(Rule(targets(f"{group.source}: targets", others), scheme))
        if by_class:
            classes.append(Rule(targets(group.source, by_class), scheme))
    left_out = (Rule(targets(f"{config.source}: ignore", ignored), None),) if ignored else ()
    return Quantisation("compressed-tensors", (*left_out, *exact, *classes))


def _refuse(config: Fields, what: str) -> None:
    raise ModelError(
        f"{config.source}: {what} of compressed-tensors is not supported; supported are {SUPPORTED}: "
        "use one of those, an unquantised model or a GGUF"
    )


def _refuse_rotations(config: Fields) -> None:
    """Of activations (compressed-tensors, transform_args.py): QuIP's, and the fourth of SpinQuant."""
    groups = config.section("transform_config").section("config_groups")
    for name in groups.values:
        places = groups.section(name).raw("apply")
        if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
            groups.section(name).refuse("apply", "a list of objects")
        for place in places:
            if place.get("location") not in FOLDED:
                _refuse(config, f"a rotation of {shown(place.get('location'))} while the model runs")


def _scheme(config: Fields, group: Fields) -> Scheme:
    format = group.raw("format") or config.raw("format")
    if format not in FORMATS:
        _refuse(config, f"the format {shown(format)}")
    if group.has("output_activations"):
        _refuse(config, "quantised output_activations")
    weights = group.section("weights")
    bits, kind, strategy = (weights.raw(name) for name in ("num_bits", "type", "strategy"))
    kind = kind or "int"
    activations = _activations(config, group, kind)
    if kind == "float" and bits == 8:
        if strategy in ("tensor", "channel"):
            return Fp8Scheme(None, activations)
        if strategy == "block":
            return Fp8Scheme(_block(weights), activations)
    if kind == "int":
        if format in ("int-quantized", "naive-quantized") and bits == 8 and strategy in ("tensor", "channel"):
            if weights.raw("symmetric") is False:
                _refuse(config, "INT8 with zero points")
            return Int8Scheme(activations)
        if bits in (4, 8) and activations == "none" and strategy in ("group", "channel") and format != "int-quantized":
            columns = weights.integer("group_size", 2, 1 << 20) if strategy == "group" else None
            return PackedScheme(bits, columns, weights.raw("symmetric") is not False)
    inputs = group.section("input_activations").raw("num_bits")
    name = f"{kind} weights of {shown(bits)} bits by {shown(strategy)}"
    _refuse(config, name + (f" with activations of {shown(inputs)} bits" if inputs is not None else ""))
    raise AssertionError


def _activations(config: Fields, group: Fields, kind: Any) -> Literal["static", "dynamic", "none"]:
    inputs = group.section("input_activations")
    if not inputs.values:
        return "none"
    if inputs.raw("num_bits") != 8 or (inputs.raw("type") or "int") != kind:
        _refuse(config, f"activations of {shown(inputs.raw('num_bits'))} bits of type {shown(inputs.raw('type'))}")
    if inputs.raw("symmetric") is False:
        _refuse(config, "activations with zero points")
    return "dynamic" if inputs.raw("dynamic") else "static"


def _block(weights: Fields) -> tuple[int, int]:
    value = weights.raw("block_structure")
    if isinstance(value, str):  # as older versions write it: "128x128"
        value = [int(size) if size.isdigit() else size for size in value.split("x")]
    fits = isinstance(value, list) and len(value) == 2 and all(is_integer(n) and 0 < n <= 4096 for n in value)
    if not fits:
        weights.refuse("block_structure", "two sizes")
    return value[0], value[1]
