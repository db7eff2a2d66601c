"""Models in the cache of the Hugging Face libraries: found, and removed.

The cache has a folder `models--ORGANISATION--NAME` for each repository, with the contents in `blobs`, and links to them
in `snapshots/COMMIT`; `refs` has the commits of branches
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.app.cli.gguf_files import choose_gguf, gguf_models, tag_of
from tessera.app.cli.hub import HUB_ID
from tessera.engine.contract.errors import ConfigError

PREFIX = "models--"
DEFAULT_REVISION = "main"
SHOWN_COMMIT = 8  # characters
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class CachedModel:
    """One model in the cache.

    Attributes:
        name: as `tessera serve` takes it: hub id, :QUANTISATION, @REVISION.
        format: safetensors, GGUF, or other.
        nbytes: on disk.
        complete: False where files of the weights are missing.
        revision: the commit.
        path: of its folder or first GGUF file.
        files: all of its own, in the snapshot.
        modified: Unix time of the newest.
    """

    name: str
    format: str
    nbytes: int
    complete: bool
    revision: str
    path: Path
    files: tuple[Path, ...]
    modified: float


def cache_folder() -> Path:
    """As HF_HUB_CACHE or HF_HOME say."""
    from huggingface_hub import constants  # takes long to import

    return Path(constants.HF_HUB_CACHE)


def cached_models(cache: Path) -> list[CachedModel]:
    """All of them, by name. A folder that cannot be read is left out."""
    found: list[CachedModel] = []
    if not cache.is_dir():
        return found
    for repository in sorted(cache.iterdir()):
        if repository.name.startswith(PREFIX) and repository.is_dir():
            name = "/".join(repository.name.removeprefix(PREFIX).split("--", 1))
            try:
                found += _models_of(repository, name)
            except OSError:
                continue
    return found


def _models_of(repository: Path, name: str) -> list[CachedModel]:
    names = {commit: ref for ref, commit in sorted(_refs(repository).items(), reverse=True)}
    broken_off = any((repository / "blobs").glob("*.incomplete"))
    models: list[CachedModel] = []
    snapshots = repository / "snapshots"
    for snapshot in sorted(snapshots.iterdir()) if snapshots.is_dir() else ():
        ref = names.get(snapshot.name, snapshot.name[:SHOWN_COMMIT])
        suffix = "" if ref == DEFAULT_REVISION else f"@{ref}"
        files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
        relative = [path.relative_to(snapshot).as_posix() for path in files]
        gguf = gguf_models(relative)
        for model, parts in gguf.items():
            own = [snapshot / part for part in parts]
            models.append(
                _model(f"{name}:{tag_of(model)}{suffix}", "GGUF", own[0], own, _all_parts(parts), snapshot.name)
            )
        if not gguf or any(file.endswith(".safetensors") for file in relative):
            complete = not broken_off and _has_weights(snapshot, relative)
            kind = "safetensors" if any(file.endswith(".safetensors") for file in relative) else "no weights"
            rest = [path for path in files if path.suffix.lower() != ".gguf"]
            models.append(_model(name + suffix, kind, snapshot, rest, complete, snapshot.name))
    if not models and broken_off:
        models.append(_model(name, "no weights", repository, [], False, ""))
    return models


def _model(name: str, kind: str, path: Path, files: Sequence[Path], complete: bool, revision: str) -> CachedModel:
    blobs = {file.resolve(): file.stat() for file in files}
    return CachedModel(
        name,
        kind,
        sum(found.st_size for found in blobs.values()),
        complete,
        revision,
        path,
        tuple(files),
        max((found.st_mtime for found in blobs.values()), default=0.0),
    )


def _refs(repository: Path) -> dict[str, str]:
    folder = repository / "refs"
    return {
        path.relative_to(folder).as_posix(): path.read_text().strip() for path in folder.rglob("*") if path.is_file()
    }


def _has_weights(snapshot: Path, names: Iterable[str]) -> bool:
    present = set(names)
    if INDEX not in present:
        return any("/" not in name and name.endswith(".safetensors") for name in present)
    try:
        shards = set(json.loads((snapshot / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return shards <= present


def _all_parts(parts: Sequence[str]) -> bool:
    """Whether all files of a split GGUF model are there, as the name of the first says."""
    _, _, count = parts[0].removesuffix(".gguf").rpartition("-of-")
    return not count.isdigit() or len(parts) == int(count)


def models_named(cache: Path, wanted: str) -> tuple[Path, list[CachedModel]]:
    """The repository's folder, and those of its models that `wanted` names.

    Raises: ConfigError where the cache has none.
    """
    hub_id = HUB_ID.fullmatch(wanted)
    if hub_id is None:
        raise ConfigError(f"{wanted!r} is not a hub id like organisation/name, as `tessera list` shows them")
    repository = cache / (PREFIX + hub_id["id"].replace("/", "--"))
    models = _models_of(repository, hub_id["id"]) if repository.is_dir() else []
    if not models:
        raise ConfigError(f"the model {hub_id['id']} is not in the cache {cache}; `tessera list` shows those that are")
    if hub_id["revision"] is not None:
        refs = _refs(repository)
        commit = refs.get(hub_id["revision"], hub_id["revision"])
        models = [model for model in models if model.revision.startswith(commit)]
        if not models:
            raise ConfigError(f"the cache has no revision {hub_id['revision']} of {hub_id['id']}")
    if hub_id["tag"] is not None:
        snapshots = repository / "snapshots"
        names = {
            file.relative_to(snapshots / model.revision).as_posix(): None
            for model in models
            if model.format == "GGUF"
            for file in model.files
        }
        chosen = choose_gguf(names, hub_id["tag"], f"the model {hub_id['id']} in the cache")
        models = [model for model in models if model.path.as_posix().endswith("/" + chosen[0])]
    return repository, models


def remove_models(repository: Path, models: Sequence[CachedModel]) -> None:
    """Remove these models of a repository, and its folder once no model is left.

    Raises: ConfigError: a file cannot be removed.
    """
    try:
        kept = [model for model in _models_of(repository, "") if model.path not in {gone.path for gone in models}]
        if not kept:
            shutil.rmtree(repository)
            shutil.rmtree(repository.parent / ".locks" / repository.name, ignore_errors=True)
            return
        needed = {file for model in kept for file in model.files}
        blobs = set()
        for file in {file for model in models for file in model.files} - needed:
            blobs.add(os.path.realpath(file))
            file.unlink(missing_ok=True)
        linked = {os.path.realpath(path) for path in (repository / "snapshots").rglob("*") if path.is_file()}
        for blob in blobs - linked:
            Path(blob).unlink(missing_ok=True)
        _remove_empty(repository / "snapshots")
        kept_commits = {model.revision for model in kept}
        for ref, commit in _refs(repository).items():
            if commit not in kept_commits:
                (repository / "refs" / ref).unlink()
    except OSError as error:
        raise ConfigError(f"{error.filename or repository} cannot be removed: {error.strerror}") from None


def _remove_empty(folder: Path) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        if root != str(folder) and not os.listdir(root):
            os.rmdir(root)
