"""Which of a folder's or a repository's GGUF files make up the model that is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tessera.engine.contract.errors import ModelError

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
QUANTISATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|MXFP4)[A-Z0-9_]*)$", re.IGNORECASE)
OTHER_FILES = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)  # parts of no language model
MAX_LISTED = 20


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def model_stem(name: str) -> str:
    """A file's name without folder, ending and number of a split model."""
    return SPLIT.sub("", PurePosixPath(name).stem)


def gguf_files_in(folder: Path) -> list[str]:
    """Relative names of a folder's GGUF files, and of those in its folders."""
    found = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return sorted(path.relative_to(folder).as_posix() for path in found if is_gguf(path.name) and path.is_file())


def choose_gguf(names: Iterable[str], tag: str | None, where: str) -> list[str]:
    """Names of the files of one model, the first first: that of which `tag` is the quantisation or the name.

    Raises: ModelError listing what there is, where none or several fit.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if is_gguf(name) and not OTHER_FILES.search(model_stem(name)):
            models.setdefault(str(PurePosixPath(name).with_name(model_stem(name))), []).append(name)
    fitting = [model for model in models if tag is None or _fits(model, tag)]
    if len(fitting) == 1:
        return models[fitting[0]]
    listed = sorted(map(_tag_of, fitting or models))
    shown = ", ".join(listed[:MAX_LISTED]) + (", ..." if len(listed) > MAX_LISTED else "")
    if not models:
        raise ModelError(f"{where} has no GGUF file of a language model")
    if not fitting:
        raise ModelError(f"{where} has no GGUF file {tag}; there are {shown}")
    raise ModelError(f"{where} has several GGUF files{'' if tag is None else f' {tag}'}: add :NAME with one of {shown}")


def _fits(model: str, tag: str) -> bool:
    stem, folder, wanted = PurePosixPath(model).name.lower(), PurePosixPath(model).parent.name.lower(), tag.lower()
    ends = stem.endswith(wanted) and stem[-len(wanted) - 1] in "-._" if len(stem) > len(wanted) else stem == wanted
    return ends or folder == wanted or f"{stem}.gguf" == wanted


def _tag_of(model: str) -> str:
    """The quantisation in its name, else the name."""
    name = PurePosixPath(model).name
    found = QUANTISATION.search(name)
    return found[1] if found is not None else name
