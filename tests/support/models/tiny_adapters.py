"""Random adapters of tiny models as PEFT saves them, and the same merged into the models' checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.tiny_models import round_to_bfloat16, write_safetensors

Array = np.ndarray[Any, Any]


@dataclass
class TinyAdapter:
    """`modules` by name, as model.layers.0.self_attn.q_proj: number of inputs and outputs. Patterns as PEFT's."""

    modules: dict[str, tuple[int, int]]
    seed: int
    rank: int = 4
    alpha: float = 8.0
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    transposed: bool = False  # the model's checkpoint has its matrices as [in, out]

    def _of(self, pattern: dict[str, Any], module: str, default: Any) -> Any:
        return next((value for end, value in pattern.items() if module.endswith(end)), default)

    def rank_of(self, module: str) -> int:
        rank: int = self._of(self.rank_pattern, module, self.rank)
        return rank

    def tensors(self) -> dict[str, Array]:
        """A and B by module, large enough to change every logit; exact in bfloat16."""
        random = np.random.default_rng(self.seed)
        found = {}
        for module, (inputs, outputs) in self.modules.items():
            rank = self.rank_of(module)
            scale = 1 / math.sqrt(inputs * rank)
            found[module + ".lora_A"] = random.normal(size=(rank, inputs)) * scale
            found[module + ".lora_B"] = random.normal(size=(outputs, rank)) * 0.5
        return {name: round_to_bfloat16(tensor.astype(np.float32)) for name, tensor in found.items()}

    def config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny/base",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": sorted({module.rpartition(".")[2] for module in self.modules}),
            "use_rslora": self.rslora,
            "use_dora": False,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            **self.changes,
        }

    def write(self, folder: Path, storage: str = "F32") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config()))
        tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in self.tensors().items()}
        write_safetensors(folder / "adapter_model.safetensors", tensors, storage)
        return folder

    def delta(self, module: str) -> Array:
        """factor * B A [out, in] in float64."""
        tensors, rank = self.tensors(), self.rank_of(module)
        alpha = self._of(self.alpha_pattern, module, self.alpha)
        factor = alpha / (math.sqrt(rank) if self.rslora else rank)
        a, b = (tensors[f"{module}.lora_{letter}"].astype(np.float64) for letter in "AB")
        return factor * b @ a


def merged(model: Path, adapter: TinyAdapter, tensors: dict[str, Array], folder: Path) -> Path:
    """A copy of a model's folder with the adapter in its weights, computed in float64."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith("index.json"):
            shutil.copy(file, folder)
    write_safetensors(folder / "model.safetensors", merged_tensors(adapter, tensors))
    return folder


def merged_tensors(adapter: TinyAdapter, tensors: dict[str, Array]) -> dict[str, Array]:
    found = dict(tensors)
    for module in adapter.modules:
        name = f"{module}.weight"
        delta = adapter.delta(module)
        found[name] = (found[name].astype(np.float64) + (delta.T if adapter.transposed else delta)).astype(np.float32)
    return found


def shapes_of(modules: Iterable[str], tensors: dict[str, Array], *, transposed: bool = False) -> dict[str, Any]:
    """Inputs and outputs of those modules whose weights are among the tensors."""
    found = {}
    for module in modules:
        tensor = tensors.get(f"{module}.weight")
        if tensor is not None:
            outputs, inputs = tensor.shape[::-1] if transposed else tensor.shape
            found[module] = (inputs, outputs)
    return found
