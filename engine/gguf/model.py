"""A model in GGUF: one file, or one split as NAME-00001-of-00003.gguf, of which the first has the metadata."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.file import GGUFFile, TensorInfo
from tessera.engine.gguf.metadata import Metadata

Array = np.ndarray[Any, Any]

MAX_FILES = 1024
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
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


def is_gguf(path: PurePath) -> bool:
    """Whether a path names such a file rather than a model folder."""
    return path.suffix.lower() == ".gguf"


def model_stem(path: PurePath) -> str:
    """A file's name without its ending, and without its number in a split model."""
    found = SPLIT_NAME.fullmatch(path.name)
    return path.stem if found is None else found["stem"]


def open_gguf(path: Path) -> GGUFModel:
    """The model in the file at `path`, and in those that it was split into; any of them may be named.

    Raises: ModelError naming the file at fault.
    """
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


def split_paths(path: Path) -> list[Path]:
    """All files of the split model that `path` belongs to by its name; itself alone where it is whole."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= MAX_FILES:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
