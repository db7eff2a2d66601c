"""The API keys that a server accepts, from options, a file or the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tessera.engine.contract.errors import ConfigError

VARIABLE = "TESSERA_API_KEY"
MAX_KEYS = 1024


def gather_api_keys(given: Sequence[str] | None, file: str | None) -> tuple[str, ...]:
    """Keys of --api-key and --api-key-file together; without either those of the environment, split at commas.

    Raises:
        ConfigError: a key that no header can carry, a file without keys, or too many of them.
    """
    if given is None and file is None:
        keys = [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]
        source = VARIABLE
    else:
        if given is not None and not all(given):
            raise ConfigError("--api-key must not be empty: leave it away to serve without keys")
        keys = [*(given or ()), *(_read_keys(file) if file is not None else ())]
        source = "--api-key" if file is None else "--api-key-file"
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{source}: key {number} must be printable ASCII without spaces, as HTTP headers need it")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source}: {len(keys)} keys are more than the {MAX_KEYS} that are accepted")
    return tuple(dict.fromkeys(keys))


def _read_keys(path: str) -> list[str]:
    """One key a line; empty lines and lines that begin with # are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no keys; the server would be open to all")
    return keys
