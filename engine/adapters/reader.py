"""An adapter's folder, checked against the model that it is for before anything of it is kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.adapters.config import AdapterConfig, read_adapter_config
from tessera.engine.adapters.modules import AdaptableModule, adaptable_modules, without_outer_name
from tessera.engine.contract.errors import ModelError
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.fields import shown
from tessera.engine.models.weights.files import ADAPTER_CONFIG
from tessera.engine.models.weights.safetensors import SafetensorsFile

Array = np.ndarray[Any, Any]

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"
PREFIX = "base_model.model."  # of every tensor's name
STORED_DTYPES = ("float32", "float16", "bfloat16")
HASHED_BYTES = 1 << 20  # at a time
MOST_VALUE = 2.0**127  # of A and B, which no 16-bit format with the range of float32 rounds to infinity
A_OR_B = re.compile(r"(?P<module>.+)\.lora_(?P<letter>[AB])(\.default)?\.weight")


@dataclass(frozen=True, eq=False)
class ModuleAdapter:
    """A [r, in] and B [out, r] of one module, as they are stored; B's rows are in the order of the weight's."""

    module: AdaptableModule
    a: Array
    b: Array
    factor: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in host memory.

    Attributes:
        rank: the largest of its modules'.
        digest: SHA-256 of its two files: adapters of equal digests are the same.
        base: see `AdapterConfig`.
    """

    modules: tuple[ModuleAdapter, ...]
    rank: int
    digest: bytes
    base: str

    @property
    def nbytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.modules)


def read_adapter(folder: Path, model: ModelConfig, *, max_rank: int) -> Adapter:
    """Read adapter_config.json and adapter_model.safetensors.

    Raises: ModelError naming the file, and what in it is missing, not supported, or does not fit the model.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}")
    config = read_adapter_config(folder)
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        if (folder / PICKLED_WEIGHTS).is_file():
            raise ModelError(
                f"{folder} has its weights in {PICKLED_WEIGHTS} only, a pickle, which could run code when opened; save "
                "the adapter as safetensors"
            )
        raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS}")
    file = SafetensorsFile(path)
    found = _pairs(file, config, model)
    largest = max(config.rank_of(name) for name in found)
    if largest > max_rank:
        raise ModelError(
            f"{folder} has rank {largest}, more than the {max_rank} that slots are made for: start the server with "
            f"--max-lora-rank {largest}"
        )
    modules = tuple(_module(file, name, *pair, config) for name, pair in found.items())
    _refuse_overlaps(path, modules)
    return Adapter(modules, largest, _digest(folder), config.base)


def _pairs(
    file: SafetensorsFile, config: AdapterConfig, model: ModelConfig
) -> dict[str, tuple[AdaptableModule, dict[str, str]]]:
    """Each module's place in the model and the names of its A and B, by its name in the adapter; shapes fit."""
    known = adaptable_modules(model)
    found: dict[str, tuple[AdaptableModule, dict[str, str]]] = {}
    for tensor in sorted(file.names):
        match = A_OR_B.fullmatch(tensor)
        if match is None:
            raise ModelError(f"{file.path} has the tensor {shown(tensor)}: {_why_refused(tensor)}")
        name = match["module"].removeprefix(PREFIX)
        module = known.get(without_outer_name(name))
        if module is None:
            accepted = ", ".join(sorted({each.rpartition(".")[2] for each in known}))
            raise ModelError(
                f"{file.path} adapts {shown(name)}, which cannot have an adapter here: of this model the modules "
                f"{accepted} of its layers can"
            )
        if not config.is_target(name):
            raise ModelError(f"{file.path} adapts {shown(name)}, which target_modules in {config.source} does not name")
        names = found.setdefault(name, (module, {}))[1]
        names[match["letter"]] = tensor
        rank = config.rank_of(name)
        expected = (rank, module.columns) if match["letter"] == "A" else (module.rows, rank)
        if file.shape(tensor) != expected:
            raise ModelError(
                f"{file.path}: the tensor {shown(tensor)} has shape {list(file.shape(tensor))}, but the model and the "
                f"rank {rank} make it {list(expected)}"
            )
        if file.dtype(tensor).name not in STORED_DTYPES:
            raise ModelError(
                f"{file.path}: the tensor {shown(tensor)} is {file.dtype(tensor).name}; it must be "
                f"{', '.join(STORED_DTYPES)}"
            )
    if not found:
        raise ModelError(f"{file.path} has no tensors")
    for name, (_, names) in found.items():
        if len(names) < 2:
            raise ModelError(f"{file.path} has no lora_{'B' if 'A' in names else 'A'} of {shown(name)}")
    return found


def _why_refused(tensor: str) -> str:
    if "lora_magnitude_vector" in tensor:
        return "DoRA cannot be served"
    if "lora_embedding_" in tensor:
        return "adapters of embeddings cannot be served"
    if "lora_bias" in tensor or tensor.endswith(".bias"):
        return "biases of adapters cannot be served"
    if "lora_" not in tensor:
        return "modules that are saved whole cannot be served"
    return "it must end with .lora_A.weight or .lora_B.weight"


def _module(
    file: SafetensorsFile, name: str, module: AdaptableModule, names: Mapping[str, str], config: AdapterConfig
) -> ModuleAdapter:
    a, b = (np.array(file.tensor(names[letter])) for letter in "AB")
    for letter, values in (("A", a), ("B", b)):
        # Nor in bfloat16: where products of several adapters are one, 0 times infinity would reach others' rows.
        if not (np.abs(values.astype(np.float32, copy=False)) <= MOST_VALUE).all():
            raise ModelError(f"{file.path}: the tensor {shown(names[letter])} has values that are not finite")
    return ModuleAdapter(module, a, b if module.order is None else b[module.order], config.factor_of(name))


def _refuse_overlaps(path: Path, modules: tuple[ModuleAdapter, ...]) -> None:
    taken: set[tuple[int, str, int]] = set()
    for each in modules:
        for part in range(*each.module.parts):
            place = (each.module.layer, each.module.field, part)
            if place in taken:
                raise ModelError(f"{path} adapts {place[1]} of layer {place[0]} twice, by two names of its modules")
            taken.add(place)


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (folder / name).open("rb") as file:
            while piece := file.read(HASHED_BYTES):
                digest.update(piece)
        digest.update(b"\0")
    return digest.digest()
