"""The API keys that a server accepts, from options, a file or the environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tessera.engine.contract.errors import ConfigError

MAX_KEYS = 1024


def gather_api_keys(given: Sequence[str], file: str | None, source: str = "--api-key") -> tuple[str, ...]:
    """The keys that were given and those in the file together.

    Args:
        source: names in errors where `given` comes from.

    Raises:
        ConfigError: a key that no header can carry, a file without keys, or too many of them.
    """
    if not all(given):
        raise ConfigError(f"{source} must not be empty: leave it out to serve without keys")
    keys = [*given, *(_read_keys(file) if file is not None else ())]
    if file is not None:
        source = "--api-key-file"
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
