"""How a model folder says that its weights are quantised, in the ways of the tools that make such folders.

All of it is read before any weights are: what cannot be served is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import Fields, is_integer, read_json_object, shown
from tessera.engine.models.quantised.compressed_tensors import read_compressed_tensors
from tessera.engine.models.quantised.fp8 import Fp8Scheme
from tessera.engine.models.quantised.groups import AwqScheme, GptqScheme
from tessera.engine.models.quantised.mlx import MlxScheme
from tessera.engine.models.quantised.nf4 import Nf4Scheme
from tessera.engine.models.quantised.rules import ALL, Quantisation, Rule, expression, globs, parts

# Files beside config.json.
GPTQ_FILE, AWQ_FILE, MODELOPT_FILE = "quantize_config.json", "quant_config.json", "hf_quant_config.json"
KEYS = ("quantization_config", "compression_config", "quantization")
MAX_GROUP = 1 << 20
SUPPORTED = (
    "FP8, W4A16, W8A16 and W8A8 of compressed-tensors, fp8, ModelOpt FP8, AWQ, GPTQ, NF4 of bitsandbytes and MLX"
)
AS_WELL = "use one of those, an unquantised model or a GGUF"


def read_quantisation(folder: Path, values: dict[str, Any]) -> Quantisation | None:
    """From config.json's `values` or a file beside it; None where nothing says that weights are quantised.

    Raises: ModelError naming the method, or the key at fault.
    """
    config = quantisation_of_config(values, f"{folder / 'config.json'}")
    if config is not None:
        return config
    for name, read in ((GPTQ_FILE, _legacy), (AWQ_FILE, _legacy_awq), (MODELOPT_FILE, _modelopt_file)):
        if (folder / name).is_file():
            return read(Fields(str(folder / name), read_json_object(folder / name)))
    return None


def quantisation_of_config(values: dict[str, Any], source: str = "config.json") -> Quantisation | None:
    """As `read_quantisation`, from config.json alone."""
    for key in KEYS:
        found = values.get(key)
        if not found and not (
            isinstance(values.get("text_config"), dict) and (found := values["text_config"].get(key))
        ):
            continue
        if not isinstance(found, dict):
            raise ModelError(f"{source}: {key} must be an object, not {shown(found)}")
        config = Fields(f"{source}: {key}", found)
        method = found.get("quant_method")
        if method is None and "config_groups" in found:
            method = "compressed-tensors"
        if method is None and "group_size" in found:
            return _mlx(config)
        read = METHODS.get(method) if isinstance(method, str) else None
        if read is None:
            refuse(config.source, f"quant_method {shown(method)}")
        return read(config)
    return None


def refuse(source: str, what: str) -> NoReturn:
    raise ModelError(f"{source}: quantisation by {what} is not supported; supported are {SUPPORTED}: {AS_WELL}")


def _listed(config: Fields, *names: str) -> list[Any]:
    """All that these lists have."""
    found: list[Any] = []
    for name in names:
        value = config.raw(name)
        if value is not None and not isinstance(value, list):
            config.refuse(name, "a list")
        found += value or []
    return found


def _left_out(config: Fields, *names: str) -> tuple[Rule, ...]:
    listed = _listed(config, *names)
    return (Rule(parts(f"{config.source}: {' and '.join(names)}", listed), None),) if listed else ()


def _group(config: Fields, name: str = "group_size") -> int | None:
    """Columns that share a scale; None for -1, a row."""
    value = config.raw(name)
    if value == -1 or value is None:
        return None
    return config.integer(name, 2, MAX_GROUP)


# -- methods --------------------------------------------------------------------------------------


def _fp8(config: Fields) -> Quantisation:
    """transformers' FineGrainedFP8Config, with blocks, and vLLM's form for a scale a tensor."""
    kind = config.raw("fmt")
    if kind not in (None, "e4m3", "float8_e4m3fn"):
        refuse(config.source, f"fp8 of format {shown(kind)}")
    activations = config.choice("activation_scheme", {"dynamic": "dynamic", "static": "static"})
    block = config.raw("weight_block_size")
    if block is not None:
        fits = isinstance(block, list) and len(block) == 2 and all(is_integer(n) and 0 < n <= 4096 for n in block)
        if not fits:
            config.refuse("weight_block_size", "two sizes")
        scheme = Fp8Scheme((block[0], block[1]), activations, "weight_scale_inv")
    else:
        scheme = Fp8Scheme(None, activations)
    left_out = _left_out(config, "modules_to_not_convert", "ignored_layers")
    return Quantisation("fp8", (*left_out, Rule(ALL, scheme)))


def _modelopt(config: Fields) -> Quantisation:
    algorithm = config.raw("quant_algo")
    if algorithm != "FP8":
        refuse(config.source, f"ModelOpt {shown(algorithm)}")
    names = ("exclude_modules", "ignore")
    listed = globs(f"{config.source}: {' and '.join(names)}", _listed(config, *names))
    left_out = (Rule(listed, None),) if listed else ()
    return Quantisation("ModelOpt FP8", (*left_out, Rule(ALL, Fp8Scheme(None, "static"))))


def _modelopt_file(config: Fields) -> Quantisation:
    return _modelopt(config.section("quantization"))


def _awq(config: Fields, group: str = "group_size", bits: str = "bits") -> Quantisation:
    version = config.raw("version")
    if version is not None and str(version).lower() != "gemm":
        refuse(config.source, f"AWQ of version {shown(version)}")
    if config.raw(bits) != 4:
        refuse(config.source, f"AWQ of {shown(config.raw(bits))} bits")
    if config.raw("zero_point") is False:
        refuse(config.source, "AWQ without zero points")
    left_out = _left_out(config, "modules_to_not_convert")
    return Quantisation("AWQ", (*left_out, Rule(ALL, AwqScheme(_group(config, group)))))


def _legacy_awq(config: Fields) -> Quantisation:
    """quant_config.json of AutoAWQ."""
    return _awq(config, "q_group_size", "w_bit")


def _gptq(config: Fields) -> Quantisation:
    version = config.raw("checkpoint_format")
    if version not in (None, "", "gptq", "gptq_v2"):
        refuse(config.source, f"GPTQ of format {shown(version)}")
    scheme = _gptq_scheme(config, config)
    rules = []
    for text, own in config.section("dynamic").values.items():
        pattern = expression(f"{config.source}: dynamic", text.removeprefix("-:").removeprefix("+:"))
        defaults = {**config.values, **own} if isinstance(own, dict) else config.values
        found = None if text.startswith("-:") else _gptq_scheme(config, Fields(f"{config.source}: dynamic", defaults))
        rules.append(Rule((pattern,), found))
    return Quantisation("GPTQ", (*rules, *_left_out(config, "modules_to_not_convert"), Rule(ALL, scheme)))


def _gptq_scheme(config: Fields, own: Fields) -> GptqScheme:
    bits = own.raw("bits")
    if bits not in (4, 8):
        refuse(own.source, f"GPTQ of {shown(bits)} bits")
    return GptqScheme(bits, _group(own), config.raw("checkpoint_format") != "gptq_v2")


def _legacy(config: Fields) -> Quantisation:
    """quantize_config.json of AutoGPTQ, and of AutoAWQ where it says so."""
    if str(config.raw("quant_method")).lower() == "awq":
        return _awq(config)
    return _gptq(config)


def _bitsandbytes(config: Fields) -> Quantisation:
    if config.raw("load_in_8bit") or config.raw("_load_in_8bit"):
        refuse(config.source, "bitsandbytes in 8 bits")
    kind = config.raw("bnb_4bit_quant_type")
    if kind != "nf4":
        refuse(config.source, f"bitsandbytes {shown('fp4' if kind is None else kind)}")
    return Quantisation("bitsandbytes", (*_left_out(config, "llm_int8_skip_modules"), Rule(ALL, Nf4Scheme())))


def _mlx(config: Fields) -> Quantisation:
    mode = config.raw("mode")
    if mode not in (None, "affine"):
        refuse(config.source, f"MLX {shown(mode)}")
    rules = []
    for name, own in config.values.items():
        if isinstance(own, dict) or own is False:
            found = _mlx_scheme(Fields(f"{config.source}: {name}", {**config.values, **own})) if own else None
            rules.append(Rule(parts(config.source, [name]), found))
    return Quantisation("MLX", (*rules, Rule(ALL, _mlx_scheme(config))), embeddings=True)


def _mlx_scheme(config: Fields) -> MlxScheme:
    bits = config.raw("bits")
    if bits not in (4, 8):
        refuse(config.source, f"MLX of {shown(bits)} bits")
    return MlxScheme(bits, config.integer("group_size", 2, MAX_GROUP))


METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
}
