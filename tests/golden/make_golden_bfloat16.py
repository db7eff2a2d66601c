"""Writes golden_bfloat16.json: how far the logits of Hugging Face transformers in bfloat16 are from its own in float32.

Run from the project's root after `make_golden_logits.py` and `make_golden_families.py`, in the environment that these
need (made with torch 2.14 and transformers 5.24 on a CPU, with accelerate for MXFP4):

    python tests/golden/make_golden_bfloat16.py

For each tiny model |b - f| / |f| of the logits b in bfloat16 and f in float32, as vectors of all positions that the
golden logits have.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.golden.make_golden_families import CONVERSIONS
from tests.support.models import tiny_families, tiny_models
from tests.support.models.tiny_families import FAMILIES, POSITIONS, VOCAB
from tests.support.models.tiny_models import TINY_MODELS, build, write_safetensors

Array = np.ndarray[Any, Any]

GOLDEN = Path(__file__).parent


def logits(folder: Path, prompt: list[int]) -> Array:
    """[T, V]"""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        found: Array = model(torch.tensor([prompt])).logits[0].float().numpy()
    return found


def family_folder(name: str, folder: Path) -> Path:
    """As transformers reads it."""
    config, tensors = FAMILIES[name], tiny_families.tensors(name)
    kind = config["model_type"]
    if kind in CONVERSIONS:
        config, tensors = CONVERSIONS[kind](config, tensors)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "architectures"}))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    exact, of_families = (np.load(GOLDEN / f"golden_{part}.npz") for part in ("logits", "families"))
    errors = {}
    for name in (*TINY_MODELS, *FAMILIES):
        with tempfile.TemporaryDirectory() as path:
            if name in FAMILIES:
                found = logits(family_folder(name, Path(path)), tiny_families.prompt())[list(POSITIONS), :VOCAB]
                expected = of_families[name]
            else:
                found = logits(build(TINY_MODELS[name], Path(path)), tiny_models.prompt())[exact["positions"]]
                expected = exact[name]
        errors[name] = round(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)), 6)
        print(f"{name:22} {errors[name]:.6f}")
    (GOLDEN / "golden_bfloat16.json").write_text(json.dumps(errors, indent=1) + "\n")


if __name__ == "__main__":
    main()
