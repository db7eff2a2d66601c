"""A model in GGUF: one file, or one split as NAME-00001-of-00003.gguf, of which the first has the metadata."""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.file import GGUFFile, TensorInfo
from tessera.engine.gguf.metadata import Metadata
from tessera.engine.gguf.names import MAX_FILES, is_gguf, split_paths

Array = np.ndarray[Any, Any]

MAX_KEPT = 2  # models whose headers are kept: the served one, and one for embeddings
COUNT_KEY, NUMBER_KEY, TENSORS_KEY = "split.count", "split.no", "split.tensors.count"


class GGUFModel:
    """All tensors of a model, and its metadata."""

    def __init__(self, files: list[GGUFFile]) -> None:
        self.path = files[0].path
        self.metadata: Metadata = files[0].metadata
        self._files: dict[str, GGUFFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in file.tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{file.path}: tensor {name!r} is in {self._files[name].path.name} too")
                self.tensors[name] = info
                self._files[name] = file

    def stored(self, name: str) -> Array:
        """The bytes of a tensor, [rows, bytes of a row] uint8, as a read-only view."""
        return self._files[name].stored(self.tensors[name])

    def file_of(self, name: str) -> Path:
        return self._files[name].path

    def count_types(self) -> Counter[str]:
        """Bytes stored in each type."""
        counts: Counter[str] = Counter()
        for info in self.tensors.values():
            counts[info.type.name] += info.nbytes
        return counts


def open_gguf(path: Path) -> GGUFModel:
    """The model in the file at `path`, and in those that it was split into; any of them may be named.

    A process goes over a header once: files that have not changed since give the same object.

    Raises: ModelError naming the file at fault.
    """
    return _open(path, tuple(map(_version_of, split_paths(path))))


def _version_of(path: Path) -> tuple[int, ...] | None:
    """The identity, size and time of a file, which tell versions apart; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=MAX_KEPT)
def _open(path: Path, versions: tuple[tuple[int, ...] | None, ...]) -> GGUFModel:
    file = GGUFFile(path)
    count = file.metadata.integer(COUNT_KEY, 0, MAX_FILES, 1)
    if count <= 1:
        return GGUFModel([file])
    paths = split_paths(path)
    if len(paths) != count:
        raise ModelError(
            f"{path} is one of {count} files of a split model, so its name must end in -00001-of-{count:05}.gguf"
        )
    absent = [sibling.name for sibling in paths if not sibling.is_file()]
    if absent:
        raise ModelError(f"{path.parent} lacks {', '.join(absent[:5])}, into which the model was split")
    files = [file if sibling == path else GGUFFile(sibling) for sibling in paths]
    for number, part in enumerate(files):
        claimed = part.metadata.integer(NUMBER_KEY, 0, MAX_FILES), part.metadata.integer(COUNT_KEY, 0, MAX_FILES)
        if claimed != (number, count):
            raise ModelError(f"{part.path} says it is file {claimed[0] + 1} of {claimed[1]}, not what its name says")
    model = GGUFModel(files)
    total = files[0].metadata.integer(TENSORS_KEY, 0, 2**31 - 1, len(model.tensors))
    if total != len(model.tensors):
        raise ModelError(f"{model.path}: {TENSORS_KEY} is {total}, but the files have {len(model.tensors)} tensors")
    return model


def stored_bytes(path: Path) -> dict[str, int]:
    """Bytes that a GGUF file stores in each type, most first; empty for a model folder."""
    return dict(open_gguf(path).count_types().most_common()) if is_gguf(path) else {}
