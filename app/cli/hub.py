"""Local folders of models, downloaded from a hub where needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import tessera.engine
from tessera.engine.contract.errors import ConfigError, ModelError

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja"]  # nothing that runs code: no .bin, .pt, .py
BUILTIN_MODEL = "tessera-builtin"
# Second copies of the weights. Folders that begin with a digit, such as 1_Pooling, belong to an embedding model.
UNWANTED_FILES = ["*/*.safetensors", "[!0-9]*/*.json", "consolidated*.safetensors"]


class ModelFolder(NamedTuple):
    """A model's folder, and the name to serve it under unless the user gives another."""

    path: Path
    name: str


def builtin_model() -> ModelFolder:
    """The small demonstration model that comes with the installation."""
    return ModelFolder(Path(tessera.engine.__file__).parent / "builtin", BUILTIN_MODEL)


def find_model(model: str) -> ModelFolder:
    """Resolve `model`, an existing folder or a hub id `organisation/name[@revision]`.

    Raises:
        ModelError: there is no such folder or hub model, or it holds no config.json.
        ConfigError: the hub cannot be reached or refuses access.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {model} is not a model: it has no config.json")
        path = path.resolve()
        return ModelFolder(path, path.name)
    if path.exists():
        raise ModelError(f"{model} is a file; give the folder that holds config.json and the weights")
    hub_id = HUB_ID.fullmatch(model)
    if hub_id is None:
        raise ModelError(f"there is no folder {model}, and it is not a hub id like organisation/name")
    return ModelFolder(_download(hub_id["id"], hub_id["revision"]), hub_id["id"])


def _download(model_id: str, revision: str | None) -> Path:
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
        folder = Path(
            snapshot_download(model_id, revision=revision, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES)
        )
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
