"""Names of GGUF files, of which NAME-00001-of-00003.gguf is one of three that hold a model."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

MAX_FILES = 1024
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def is_gguf(path: PurePath) -> bool:
    """Whether a path names such a file rather than a model folder."""
    return path.suffix.lower() == ".gguf"


def model_stem(path: PurePath) -> str:
    """A file's name without its ending, and without its number in a split model."""
    found = SPLIT_NAME.fullmatch(path.name)
    return path.stem if found is None else found["stem"]


def split_paths(path: Path) -> list[Path]:
    """All files of the split model that `path` belongs to by its name; itself alone where it is whole."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= MAX_FILES:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
