"""How a model's token vectors become one embedding, from the files that sentence-transformers leaves in a folder.

modules.json lists the steps: a transformer, its pooling (`1_Pooling/config.json`), and as a rule a
normalisation. Every embedding is brought to unit length here, whether or not the list ends with that, because
that is what users of the API rely on; the angles between embeddings do not change by it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.engine.contract.config import PoolingName
from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf import is_gguf, open_gguf
from tessera.engine.models.fields import MAX_JSON_BYTES, Fields, read_json_object, shown
from tessera.engine.models.gguf.config import read_pooling

MAX_MODULES = 16
MAX_SEQ_LENGTH = 2**27
MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")  # the last one makes no embeddings
MODES: dict[str, PoolingName] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
NEWER_MODES: dict[str, PoolingName] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
FOLDER_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class PoolingConfig:
    """`kind`: the mean over all tokens, the last or the first (`cls`). `max_input_tokens`: None sets no limit."""

    kind: PoolingName
    max_input_tokens: int | None


def load_pooling(folder: Path, chosen: PoolingName, default: PoolingName) -> PoolingConfig:
    """What `chosen` says; with `auto` what the folder says, and `default` where it says nothing.

    Raises: ModelError naming the file and what in it is not supported.
    """
    if is_gguf(folder):
        kind = read_pooling(open_gguf(folder)) if chosen == "auto" else chosen
        return PoolingConfig(kind or default, None)
    limit = None
    limit_file = folder / "sentence_bert_config.json"
    if limit_file.is_file():
        fields = Fields(str(limit_file), read_json_object(limit_file))
        limit = fields.integer("max_seq_length", 1, MAX_SEQ_LENGTH) if fields.has("max_seq_length") else None
    modules = folder / "modules.json"
    found = _pooling_folder(modules) if modules.is_file() else None
    if chosen != "auto":
        return PoolingConfig(chosen, limit)
    return PoolingConfig(default if found is None else _pooling_kind(found / "config.json"), limit)


def _pooling_folder(path: Path) -> Path | None:
    """Of the Pooling step; None where the list has none."""
    modules = _read_list(path)
    found = None
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in MODULES:
            raise ModelError(f"{path}: a step of type {shown(kind)} is not supported; supported are {_listed(MODULES)}")
        if kind == "Pooling":
            name = module.get("path")
            if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
                raise ModelError(f"{path}: the path of the Pooling step must be a folder's name, not {shown(name)}")
            found = path.parent / name
    return found


def _read_list(path: Path) -> list[Any]:
    try:
        text = path.read_bytes()
        parsed = json.loads(text) if len(text) <= MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, list) or len(parsed) > MAX_MODULES:
        raise ModelError(f"{path} must hold a list of at most {MAX_MODULES} steps")
    return parsed


def _pooling_kind(path: Path) -> PoolingName:
    if not path.is_file():
        raise ModelError(f"{path} is missing, which modules.json names; choose with --pooling mean, last or cls")
    values = read_json_object(path)
    if "pooling_mode" in values:
        mode = values["pooling_mode"]
        (mode,) = mode if isinstance(mode, list) and len(mode) == 1 else (mode,)
        if not isinstance(mode, str) or mode not in NEWER_MODES:
            raise ModelError(
                f"{path}: pooling_mode must be one of {_listed(tuple(NEWER_MODES))}, not {shown(mode)}; "
                "--pooling mean, last or cls overrides the file"
            )
        return NEWER_MODES[mode]
    on = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in MODES:
        raise ModelError(
            f"{path}: exactly one of {_listed(tuple(MODES))} must be true, not {_listed(tuple(on)) or 'none'}; "
            "--pooling mean, last or cls overrides the file"
        )
    return MODES[on[0]]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
