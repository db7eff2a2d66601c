"""Low-rank adapters (Hu et al. 2021), and their folders as PEFT writes them.

y = x W^T + factor * (x A^T) B^T, with A [r, in] and B [out, r]; factor is alpha / r, or alpha / sqrt(r) with rsLoRA
(Kalajdzievski 2023).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.adapters.config import ALL_LINEAR
from tessera.engine.adapters.reader import ADAPTER_WEIGHTS, PREFIX
from tessera.engine.autograd.variable import Variable
from tessera.engine.contract.config import MAX_LORA_RANK
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.models.fields import Fields, read_json_object
from tessera.engine.models.weights.checkpoint_source import PROJECTIONS
from tessera.engine.models.weights.files import ADAPTER_CONFIG
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Device, Tensor, empty, float32, from_numpy
from tessera.engine.training.parameters import Parameter, Parameters
from tessera.engine.training.tensor_files import load_tensors, save_tensors


@dataclass(frozen=True)
class LoraSettings:
    """Attributes:
    rank: r.
    alpha: see the module's description.
    targets: last parts of modules' names, such as q_proj; ALL_LINEAR alone is every projection of the layers.
    rank_stabilised: rsLoRA.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rank_stabilised: bool = False

    @property
    def factor(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True, eq=False)
class Adapter:
    """Of one module."""

    a: Variable  # [r, in]
    b: Variable  # [out, r]
    factor: float


def adapted_modules(parameters: Parameters) -> Iterator[tuple[str, int, int, Parameter | None]]:
    """Every projection of the layers that can have an adapter: module, rows, columns, and where its weight is, None
    where it is quantised."""
    for (layer, field, kind), parameter in parameters.by_key.items():
        if layer is not None and field in PROJECTIONS and kind == "weight":
            for name, rows in parameter.parts:
                yield name.removesuffix(".weight"), rows, parameter.variable.shape[1], parameter
    for (layer, field), matrix in parameters.quantised.items():
        if layer is not None and field in PROJECTIONS:
            for name, rows in matrix.parts:
                yield name.removesuffix(".weight"), rows, matrix.weight.shape[1], None


def make_adapters(
    parameters: Parameters, settings: LoraSettings, device: Device, dtype: np.dtype[Any] = float32, *, seed: int
) -> dict[str, Adapter]:
    """Adapters that change nothing yet: A is uniform within 1 / sqrt(in), as PEFT has it, and B is 0.

    Raises: ConfigError naming a target that no module has, and those there are.
    """
    if not 1 <= settings.rank <= MAX_LORA_RANK:
        raise ConfigError(f"the rank of LoRA adapters must be from 1 to {MAX_LORA_RANK}, not {settings.rank}")
    modules = list(adapted_modules(parameters))
    known = sorted({module.rpartition(".")[2] for module, *_ in modules})
    unknown = [target for target in settings.targets if target not in (*known, ALL_LINEAR)]
    if unknown or not settings.targets:
        named = f"has no module {unknown[0]}" if unknown else "needs modules"
        raise ConfigError(f"the model {named} for LoRA; it has {', '.join(known)}, and {ALL_LINEAR} is all of them")
    rng = np.random.Generator(np.random.Philox(key=seed))
    adapters = {}
    for module, rows, columns, _ in modules:
        if ALL_LINEAR in settings.targets or module.rpartition(".")[2] in settings.targets:
            bound = 1 / math.sqrt(columns)
            a = rng.uniform(-bound, bound, (settings.rank, columns)).astype(dtype)
            b = np.zeros((rows, settings.rank), dtype)
            leaves = [Variable(from_numpy(array, device), requires_grad=True) for array in (a, b)]
            adapters[module] = Adapter(leaves[0], leaves[1], settings.factor)
    return adapters


def adapter_parameters(adapters: Mapping[str, Adapter]) -> Iterator[Parameter]:
    """For an optimiser; the names are those of the adapter's file."""
    for module, adapter in adapters.items():
        for kind, variable in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            name = f"{PREFIX}{module}.{kind}.weight"
            yield Parameter(name, variable, ((name, variable.shape[0]),))


def save_adapter(folder: Path, adapters: Mapping[str, Adapter], settings: LoraSettings, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `base` is the model's name or path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapters}),
        "use_rslora": settings.rank_stabilised,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    tensors = {parameter.name: parameter.variable.value for parameter in adapter_parameters(adapters)}
    save_tensors(folder / ADAPTER_WEIGHTS, tensors)
    partial = folder / f".{ADAPTER_CONFIG}.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(partial, folder / ADAPTER_CONFIG)


def load_adapter(folder: Path, parameters: Parameters, device: Device) -> tuple[dict[str, Adapter], LoraSettings]:
    """An adapter's folder, of PEFT or of `save_adapter`.

    Raises: ModelError naming what is missing, of another kind, or does not fit the model.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelError(f"{folder} has no {ADAPTER_CONFIG}")
    config = Fields(str(path), read_json_object(path), {"lora_alpha": 8, "use_rslora": False, "bias": "none"})
    if config.raw("peft_type") != "LORA":
        config.refuse("peft_type", '"LORA"')
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.raw(key):
            config.refuse(key, "false or empty")
    if config.raw("bias") != "none":
        config.refuse("bias", '"none"')
    targets = config.raw("target_modules")
    settings = LoraSettings(
        rank=config.integer("r", 1, MAX_LORA_RANK),
        alpha=config.number("lora_alpha", 1e-6, 1e6),
        targets=tuple(targets) if isinstance(targets, list) else (str(targets),),
        rank_stabilised=config.boolean("use_rslora"),
    )
    tensors = load_tensors(folder / ADAPTER_WEIGHTS, device)
    adapters = {}
    for module, rows, columns, _ in adapted_modules(parameters):
        names = [f"{PREFIX}{module}.lora_{letter}.weight" for letter in "AB"]
        if not any(name in tensors for name in names):
            continue
        leaves = []
        for name, shape in zip(names, ((settings.rank, columns), (rows, settings.rank)), strict=True):
            tensor = tensors.pop(name, None)
            if tensor is None or tensor.shape != shape:
                found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
                raise ModelError(f"{folder}: the tensor {name} is {found}; the model makes it {list(shape)}")
            leaves.append(Variable(tensor, requires_grad=True))
        adapters[module] = Adapter(leaves[0], leaves[1], settings.factor)
    if tensors:
        raise ModelError(f"{folder} has the tensor {min(tensors)}, which the model has no place for")
    return adapters, settings


def merge(parameters: Parameters, adapters: Mapping[str, Adapter], ops: Ops) -> None:
    """W += factor * B A in place, computed in float32 and rounded once. Raises: ConfigError where W is quantised."""
    start_of: dict[int, int] = {}
    for module, rows, columns, parameter in adapted_modules(parameters):
        if parameter is None:
            raise ConfigError(f"{module} is quantised, so that no adapter can be merged into it")
        start = start_of.get(id(parameter), 0)
        start_of[id(parameter)] = start + rows
        adapter = adapters.get(module)
        if adapter is None:
            continue
        weight = parameter.variable.value[start : start + rows]
        a, b = (_float32(variable.value, ops) for variable in (adapter.a, adapter.b))
        transposed = from_numpy(np.ascontiguousarray(a.numpy().T), ops.device)  # [in, r]
        delta = ops.scale(ops.matmul(b, transposed), adapter.factor)
        assert delta.shape == (rows, columns)
        ops.copy(ops.add(_float32(weight, ops), delta), out=weight)


def _float32(tensor: Tensor, ops: Ops) -> Tensor:
    if tensor.dtype == float32:
        return tensor
    return ops.copy(tensor, out=empty(tensor.shape, float32, ops.device))
