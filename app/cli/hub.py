"""Local folders and files of models, downloaded from a hub where needed."""

from __future__ import annotations

import difflib
import fnmatch
import glob
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tessera.engine
from tessera.app.cli.gguf_files import choose_gguf, gguf_files_in, tag_of
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.contract.lfs import POINTER_ERROR, is_lfs_pointer
from tessera.engine.gguf.names import is_gguf, model_stem

logger = logging.getLogger("tessera.serve")

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<tag>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "SYSTEM_PROMPT.txt"]
WANTED_FILES = ["*.safetensors", *SMALL_FILES]  # nothing that runs code: no .bin, .pt, .py
BUILTIN_MODEL = "tessera-builtin"
MAX_LISTED_FOLDERS = 5
HEAD_BYTES = 64
GGUF_MAGIC = b"GGUF"
DIFFUSERS_INDEX = "model_index.json"
# Second copies of the weights. Folders that begin with a digit, such as 1_Pooling, belong to an embedding model.
UNWANTED_FILES = ["*/*.safetensors", "[!0-9]*/*.json"]
# The same of Mistral's repositories, but where they have no others.
CONSOLIDATED_FILES = "consolidated*.safetensors"
PARAMS_FILE = "params.json"


class ModelFolder(NamedTuple):
    """A model's folder or GGUF file, and the name to serve it under unless the user gives another."""

    path: Path
    name: str


def builtin_model() -> ModelFolder:
    """The small demonstration model that comes with the installation."""
    return ModelFolder(Path(tessera.engine.__file__).parent / "builtin", BUILTIN_MODEL)


def find_model(model: str, *, weights: bool = True) -> ModelFolder:
    """Resolve `model`: a folder, a GGUF file, a hub id `organisation/name[@revision]`, or BUILTIN_MODEL.

    `:Q4_K_M` after a folder or a hub id's name chooses among several GGUF files, by quantisation or name.

    Args:
        weights: False: of a hub model in safetensors only the small files are downloaded, and nothing is refused.

    Raises:
        ModelError: there is no such folder, file or hub model, or it holds no model.
        ConfigError: the hub cannot be reached or refuses access.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path.resolve(), None)
    if path.is_file() and is_gguf(path):
        return ModelFolder(path.resolve(), model_stem(path))
    if path.is_file():
        raise ModelError(_why_no_model_file(path))
    stem, colon, tag = model.rpartition(":")
    if colon and tag and Path(stem).expanduser().is_dir():
        return _in_folder(Path(stem).expanduser().resolve(), tag)
    if model == BUILTIN_MODEL:
        return builtin_model()
    hub_id = HUB_ID.fullmatch(model)
    if hub_id is None:
        beside = _folders_beside(path)
        raise ModelError(f"there is no folder {model}{beside}, and it is not a hub id like organisation/name")
    name = hub_id["id"] if hub_id["tag"] is None else f"{hub_id['id']}:{hub_id['tag']}"
    try:
        return ModelFolder(_download(hub_id["id"], hub_id["revision"], hub_id["tag"], weights), name)
    except ConfigError as error:
        beside, start = _folders_beside(path), f"there is no folder {hub_id['id']}"
        if not beside:
            raise
        if str(error).startswith(start):
            raise ModelError(f"{start}{beside}{str(error).removeprefix(start)}") from None
        raise type(error)(f"{start}{beside}; and as a hub id: {error}") from None


def _why_no_model_file(path: Path) -> str:
    """A sentence about a file that has no name of a GGUF file."""
    from tessera.engine.models.weights.files import PICKLE_SUFFIXES  # imports NumPy

    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if is_lfs_pointer(head):
        return f"{path} {POINTER_ERROR}"
    if head.startswith(GGUF_MAGIC):
        return f"{path} is a GGUF file by its content, but not by its name: rename it to {path.name}.gguf"
    if path.suffix == ".safetensors" or path.name == "config.json":
        return f"{path} is one file of a model: give its folder, {path.parent}"
    if path.suffix in PICKLE_SUFFIXES:
        return f"{path} is a pickle, which could run code when opened; get the model in safetensors or GGUF"
    return f"{path} is a file; give a GGUF file, or the folder that holds config.json and the weights"


def _folders_beside(path: Path) -> str:
    """Similar names beside a missing folder, else any names there; empty without a parent."""
    parent = path.parent
    if not path.name or parent == Path() or not parent.is_dir():
        return ""
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() or is_gguf(entry))
    if not names:
        return f" ({parent} is empty)"
    alike = difflib.get_close_matches(path.name, names, MAX_LISTED_FOLDERS)
    shown = ", ".join((alike or names)[:MAX_LISTED_FOLDERS])
    return f" ({parent} has {shown}{', ...' if len(alike or names) > MAX_LISTED_FOLDERS else ''})"


def _in_folder(folder: Path, tag: str | None) -> ModelFolder:
    """The GGUF file that `tag` names; without it the folder itself, or its GGUF file where that is all it has."""
    names = gguf_files_in(folder)
    if tag is None and (any(folder.glob("*.safetensors")) or not names):
        _check_config(folder, f"the folder {folder}", (file.name for file in folder.iterdir()))
        return ModelFolder(folder, folder.name)
    chosen = choose_gguf(names, tag, f"the folder {folder}")
    return ModelFolder(folder / chosen[0], model_stem(Path(chosen[0])))


def _download(model_id: str, revision: str | None, tag: str | None, weights: bool) -> Path:
    # Imported only here: it takes a third of a second, and reads HF_ENDPOINT and HF_HOME as it is imported.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from tessera.app.cli.download_bar import HubBar, download_bar
    from tessera.engine.models.config import read_model_config
    from tessera.engine.models.weights.files import why_no_weights

    hub = constants.ENDPOINT
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its hints would stand between the lines of the start
    silent: Any = HubBar.silent()
    try:
        if tag is None:
            folder = Path(
                snapshot_download(
                    model_id,
                    revision=revision,
                    allow_patterns=SMALL_FILES,
                    ignore_patterns=UNWANTED_FILES,
                    tqdm_class=silent,
                )
            )
        names = _files_of(model_id, revision)
        gguf_names = [name for name in names if is_gguf(Path(name))]
        outer = [name for name in names if "/" not in name]
        safetensors = any(name.endswith(".safetensors") for name in outer)
        if tag is not None or (gguf_names and not safetensors):
            chosen = choose_gguf(gguf_names, tag, f"the hub model {model_id}")
            patterns = [glob.escape(name) for name in chosen]
            if not weights and not _in_cache(model_id, revision, chosen):
                raise ModelError(
                    f"the file {chosen[0]} of {model_id} is not in the cache, and a GGUF file is described by itself: "
                    f"`tessera pull {model_id}:{tag_of(model_stem(Path(chosen[0])))}` downloads it"
                )
            with download_bar(model_id) as bar:
                folder = Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns, tqdm_class=bar))
            return folder / chosen[0]
        if not weights:
            return folder
        # The weights take long, so what can be refused is refused before.
        _check_config(folder, f"the hub model {model_id}", outer)
        read_model_config(folder)
        if not safetensors:
            raise ModelError(why_no_weights(f"the hub model {model_id}", outer))
        copies = () if _is_in_mistrals_form(outer) else (CONSOLIDATED_FILES,)
        with download_bar(model_id) as bar:
            return Path(
                snapshot_download(
                    model_id,
                    revision=revision,
                    allow_patterns=WANTED_FILES,
                    ignore_patterns=[*UNWANTED_FILES, *copies],
                    tqdm_class=bar,
                )
            )
    except ModelError:
        raise
    except GatedRepoError:
        raise ConfigError(
            f"the model {model_id} is gated: accept its terms at {hub}/{model_id} and set HF_TOKEN to your token"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {model_id}, and no public model of that name at {hub} (a private one needs HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"the model {model_id} at {hub} has no revision {revision}") from None
    except LocalEntryNotFoundError as error:
        answer = getattr(error.__cause__, "response", None)
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        elif answer is not None:
            reason = f"{hub} answers with status {answer.status_code}"
        else:
            reason = f"{hub} cannot be reached"
        raise ConfigError(
            f"{reason}, and the model {model_id} is not complete in the cache {constants.HF_HUB_CACHE}"
        ) from None
    except Exception as error:  # the client passes on errors of its HTTP library and of the disk
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"the model {model_id} could not be downloaded from {hub}: {reason}") from error


def _in_cache(model_id: str, revision: str | None, names: Iterable[str]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return all(isinstance(try_to_load_from_cache(model_id, name, revision=revision), str) for name in names)


def _check_config(folder: Path, where: str, names: Iterable[str]) -> None:
    """Raises: ModelError that says what a folder without config.json is; `names` are all of its files."""
    present = set(names)
    if (folder / "config.json").is_file() or _is_in_mistrals_form(present):
        return
    from tessera.engine.models.fields import read_json_object  # all of these import NumPy
    from tessera.engine.models.weights.files import ADAPTER_CONFIG, adapter_sentence

    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            adapter_sentence(where, read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
        )
    if (folder / DIFFUSERS_INDEX).is_file():
        kind = read_json_object(folder / DIFFUSERS_INDEX).get("_class_name")
        named = f" ({kind})" if isinstance(kind, str) else ""
        raise ModelError(f"{where} is a diffusers pipeline{named}, which makes images; language models are served")
    if "params.json" in present:
        raise ModelError(f"{where} is in its maker's own format (params.json); get its version with config.json")
    raise ModelError(f"{where} is not a model: it has no config.json")


def _is_in_mistrals_form(names: Iterable[str]) -> bool:
    """Whether the files are params.json with consolidated safetensors, which other repositories have as copies."""
    present = set(names)
    return (
        PARAMS_FILE in present
        and "config.json" not in present
        and any(fnmatch.fnmatchcase(name, CONSOLIDATED_FILES) for name in present)
    )


def _files_of(model_id: str, revision: str | None) -> list[str]:
    """Names of a repository's files; of those in the cache where the hub cannot be reached."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if not constants.HF_HUB_OFFLINE:
        try:
            siblings = HfApi().model_info(model_id, revision=revision or constants.DEFAULT_REVISION).siblings
            return [file.rfilename for file in siblings or ()]
        except HfHubHTTPError:
            raise
        except Exception as error:  # errors of the client's HTTP library: there is no connection
            logger.debug("%s cannot be asked for its files: %s", constants.ENDPOINT, error)
    # Of no file, for a repository of which one model was downloaded is not complete.
    folder = snapshot_download(model_id, revision=revision, local_files_only=True, allow_patterns=[""])
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]
