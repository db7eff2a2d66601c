"""The data folder: where it is, and that this user alone can enter it."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from tessera.engine.contract.errors import ConfigError

logger = logging.getLogger("tessera.serve")

NO_FOLDER = "none"
RUN_FOLDER = "data"  # in the run folder, where there is none that stays
OWN_NAME = "tessera"


def data_folder(given: str | None) -> Path | None:
    """The folder that `--data-dir` names, created where it is missing; None for `none`.

    Without one it is `tessera` in the user's state folder (XDG Base Directory Specification), or None, with a line in
    the log, where that cannot be written.

    Raises:
        ConfigError: the given folder cannot be written.
    """
    if given == NO_FOLDER:
        return None
    if given is not None:
        try:
            return _prepared(Path(given).expanduser().resolve())
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"--data-dir {given} cannot be used: {error}") from None
    try:
        return _prepared(_state_home() / OWN_NAME)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.warning("what is stored goes when the server ends (see --data-dir): %s", error)
        return None


def _state_home() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    return Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"


def _prepared(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # whether it can be written
        return folder
