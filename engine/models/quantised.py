"""How a model folder says that its weights are quantised, in the ways of the tools that make such folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.engine.models.fields import read_json_object, shown

# Files beside config.json, the tools that write them, and the keys that name the method.
FILES = {
    "quantize_config.json": ("GPTQ or AWQ", "quant_method"),
    "quant_config.json": ("AWQ", "quant_method"),
    "hf_quant_config.json": ("ModelOpt", "quant_algo"),
}
EXPERTS_METHOD = "mxfp4"  # whose tensors, of experts alone, are read as they are
KEYS = {"quantization_config": "", "compression_config": "", "quantization": "MLX, "}


def quantisation_named(folder: Path, values: dict[str, Any]) -> str | None:
    """The method and where it is said, from config.json's `values` or a file beside it; None where nothing says so."""
    named = quantisation_in_config(values)
    if named is not None:
        return named
    for name, (tool, key) in FILES.items():
        if (folder / name).is_file():
            found = read_json_object(folder / name)
            section = found.get("quantization")
            method = (section if isinstance(section, dict) else found).get(key)
            return f"{shown(method) if method is not None else tool}, says {name}"
    return None


def quantisation_in_config(values: dict[str, Any]) -> str | None:
    """As `quantisation_named`, from config.json alone."""
    for key, tool in KEYS.items():
        found = values.get(key)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else None
            if method == EXPERTS_METHOD:
                continue
            return f"{tool}{key}" if method is None else f"{key} {shown(method)}"
    return None
