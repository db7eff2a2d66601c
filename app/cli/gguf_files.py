"""Which of a folder's or a repository's GGUF files make up the model that is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.names import is_gguf, model_stem

QUANTISATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|MXFP4)[A-Z0-9_]*)$", re.IGNORECASE)
OTHER_FILES = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)  # parts of no language model
MAX_LISTED = 20


def gguf_files_in(folder: Path) -> list[str]:
    """Relative names of a folder's GGUF files, and of those in its folders."""
    found = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return sorted(path.relative_to(folder).as_posix() for path in found if is_gguf(path) and path.is_file())


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The models among the names of files: path without number and ending -> names of its files, the first first."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if is_gguf(path) and not OTHER_FILES.search(model_stem(path)):
            models.setdefault(str(path.with_name(model_stem(path))), []).append(name)
    return models


def choose_gguf(names: Iterable[str], tag: str | None, where: str) -> list[str]:
    """Names of the files of one model, the first first: that of which `tag` is the quantisation or the name.

    Raises: ModelError listing what there is, where none or several fit.
    """
    models = gguf_models(names)
    fitting = [model for model in models if tag is None or _fits(model, tag)]
    if len(fitting) == 1:
        return models[fitting[0]]
    listed = sorted(map(tag_of, fitting or models))
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


def tag_of(model: str) -> str:
    """The quantisation in a model's name, else the name."""
    name = PurePosixPath(model).name
    found = QUANTISATION.search(name)
    return found[1] if found is not None else name
