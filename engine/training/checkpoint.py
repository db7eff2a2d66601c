"""Checkpoints of a training: complete or absent, whenever the process is killed.

A checkpoint is a folder `step-00000120` with the optimiser's tensors and a JSON object. It is written under another
name, brought to the disk and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.fields import read_json_object
from tessera.engine.tensor import Device, Tensor
from tessera.engine.training.tensor_files import load_tensors, save_tensors

NAME = re.compile(r"step-(\d{8})")
STATE_FILE = "state.json"
TENSORS_FILE = "state.safetensors"


class Checkpoints:
    """Those in a folder, of which the newest `kept` stay."""

    def __init__(self, folder: Path, kept: int = 2) -> None:
        self.folder = folder
        self._kept = kept

    def newest(self) -> Path | None:
        found = sorted(self._complete())
        return found[-1] if found else None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Raises: OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"step-{step:08}"
        partial = self.folder / f".{place.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_tensors(partial / TENSORS_FILE, tensors)
        with (partial / STATE_FILE).open("w") as file:
            json.dump({"step": step, **state}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        _sync_folder(self.folder)
        for old in sorted(self._complete())[: -self._kept]:
            shutil.rmtree(old)
        return place

    def _complete(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if NAME.fullmatch(path.name))


def load_checkpoint(folder: Path, device: Device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """-> tensors, state. Raises: ConfigError naming a file that is missing; ModelError where one is malformed."""
    for name in (STATE_FILE, TENSORS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no checkpoint of a training: it has no {name}")
    state = read_json_object(folder / STATE_FILE)
    if not isinstance(state.get("step"), int):
        raise ConfigError(f"{folder / STATE_FILE} says no step")
    return load_tensors(folder / TENSORS_FILE, device), state


def _sync_folder(folder: Path) -> None:
    """So that its entries are on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
