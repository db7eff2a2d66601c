"""Local folders and files of models, downloaded from a hub where needed."""

from __future__ import annotations

import glob
import logging
import re
from pathlib import Path
from typing import NamedTuple

import tessera.engine
from tessera.app.cli.gguf_files import choose_gguf, gguf_files_in
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.gguf import is_gguf, model_stem

logger = logging.getLogger("tessera.serve")

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<tag>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja"]  # nothing that runs code: no .bin, .pt, .py
BUILTIN_MODEL = "tessera-builtin"
# Second copies of the weights. Folders that begin with a digit, such as 1_Pooling, belong to an embedding model.
UNWANTED_FILES = ["*/*.safetensors", "[!0-9]*/*.json", "consolidated*.safetensors"]


class ModelFolder(NamedTuple):
    """A model's folder or GGUF file, and the name to serve it under unless the user gives another."""

    path: Path
    name: str


def builtin_model() -> ModelFolder:
    """The small demonstration model that comes with the installation."""
    return ModelFolder(Path(tessera.engine.__file__).parent / "builtin", BUILTIN_MODEL)


def find_model(model: str) -> ModelFolder:
    """Resolve `model`: a folder, a GGUF file, or a hub id `organisation/name[@revision]`.

    `:Q4_K_M` after a folder or a hub id's name chooses among several GGUF files, by quantisation or name.

    Raises:
        ModelError: there is no such folder, file or hub model, or it holds no model.
        ConfigError: the hub cannot be reached or refuses access.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path.resolve(), None)
    if path.is_file() and is_gguf(path):
        return ModelFolder(path.resolve(), model_stem(path))
    if path.exists():
        raise ModelError(f"{model} is a file; give a GGUF file, or the folder that holds config.json and the weights")
    stem, colon, tag = model.rpartition(":")
    if colon and tag and Path(stem).expanduser().is_dir():
        return _in_folder(Path(stem).expanduser().resolve(), tag)
    hub_id = HUB_ID.fullmatch(model)
    if hub_id is None:
        raise ModelError(f"there is no folder {model}, and it is not a hub id like organisation/name")
    name = hub_id["id"] if hub_id["tag"] is None else f"{hub_id['id']}:{hub_id['tag']}"
    return ModelFolder(_download(hub_id["id"], hub_id["revision"], hub_id["tag"]), name)


def _in_folder(folder: Path, tag: str | None) -> ModelFolder:
    """The GGUF file that `tag` names; without it the folder itself, or its GGUF file where that is all it has."""
    names = gguf_files_in(folder)
    if tag is None and (any(folder.glob("*.safetensors")) or not names):
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {folder} is not a model: it has no config.json")
        return ModelFolder(folder, folder.name)
    chosen = choose_gguf(names, tag, f"the folder {folder}")
    return ModelFolder(folder / chosen[0], model_stem(Path(chosen[0])))


def _download(model_id: str, revision: str | None, tag: str | None) -> Path:
    # Imported only here: it takes a third of a second, and reads HF_ENDPOINT and HF_HOME as it is imported.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        if tag is None:
            folder = Path(
                snapshot_download(
                    model_id, revision=revision, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES
                )
            )
        if tag is not None or not any(folder.glob("*.safetensors")):
            names = _gguf_files_of(model_id, revision)
            if tag is not None or names:
                chosen = choose_gguf(names, tag, f"the hub model {model_id}")
                patterns = [glob.escape(name) for name in chosen]
                return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns)) / chosen[0]
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
    if not (folder / "config.json").is_file():
        raise ModelError(f"the hub model {model_id} has no config.json, so it cannot be served")
    return folder


def _gguf_files_of(model_id: str, revision: str | None) -> list[str]:
    """Names of a repository's GGUF files; of those in the cache where the hub cannot be reached."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if not constants.HF_HUB_OFFLINE:
        try:
            siblings = HfApi().model_info(model_id, revision=revision or constants.DEFAULT_REVISION).siblings
            return [file.rfilename for file in siblings or () if is_gguf(Path(file.rfilename))]
        except HfHubHTTPError:
            raise
        except Exception as error:  # errors of the client's HTTP library: there is no connection
            logger.debug("%s cannot be asked for its files: %s", constants.ENDPOINT, error)
    # Of no file, for a repository of which one model was downloaded is not complete.
    folder = snapshot_download(model_id, revision=revision, local_files_only=True, allow_patterns=[""])
    return gguf_files_in(Path(folder))
