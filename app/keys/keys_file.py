"""The keys file: YAML or JSON, one entry for each name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tessera.app.keys.api_key import NO_SLOT, ApiKey, KeyEntry
from tessera.engine.contract.errors import ConfigError

MAX_KEYS = 1024
MAX_BYTES = 2**22
HEADER = "# API keys of Tessera, made by `tessera keys`. Only digests are stored; see docs/operating/keys.md.\n"


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...] = ()


def read_keys_file(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a file.

    Raises:
        ConfigError: it cannot be read, or names the entry and the field that cannot be used.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"--api-keys-file {path} has more than {MAX_BYTES} bytes")
    try:
        content: Any = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--api-keys-file {path}{place} is neither YAML nor JSON") from None
    if isinstance(content, dict) and isinstance(content.get("keys"), list):
        content = {**content, "keys": [_with_one_digest_as_list(entry) for entry in content["keys"]]}
    try:
        entries = msgspec.convert(content if content is not None else {}, KeysFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"--api-keys-file {path}: {error}") from None
    _check(entries, path)
    return entries


def write_keys_file(path: Path, entries: Iterable[KeyEntry]) -> None:
    """Replace a file, which only its owner can read, at once: a server that reads it sees the old or the new one.

    Raises:
        ConfigError: it cannot be written, or has too many keys.
    """
    kept = tuple(entries)
    _check(kept, path)
    content = [msgspec.to_builtins(entry) for entry in kept]
    for entry in content:
        entry["sha256"] = list(entry["sha256"])
    text = HEADER + yaml.safe_dump({"keys": content}, sort_keys=False)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path} cannot be written: {error.strerror}") from None


def with_slots(entries: Sequence[KeyEntry], before: Sequence[ApiKey] = ()) -> tuple[ApiKey, ...]:
    """Entries with slots: that of the same name before, or else one that no name has."""
    known = {key.name: key.slot for key in before}
    taken = {known[entry.name] for entry in entries if entry.name in known}
    free = iter(slot for slot in range(MAX_KEYS) if slot not in taken and slot not in known.values())
    reused = iter(slot for slot in sorted(known.values()) if slot not in taken)  # only where all others are taken
    found = []
    for entry in entries:
        slot = known.get(entry.name, NO_SLOT)
        if slot == NO_SLOT:
            slot = next(free, NO_SLOT)
        if slot == NO_SLOT:
            slot = next(reused)
        found.append(ApiKey(**{**msgspec.structs.asdict(entry), "slot": slot}))
    return tuple(found)


def _with_one_digest_as_list(entry: Any) -> Any:
    if isinstance(entry, dict) and isinstance(entry.get("sha256"), str):
        return {**entry, "sha256": [entry["sha256"]]}
    return entry


def _check(entries: Sequence[KeyEntry], path: Path) -> None:
    """Raise ConfigError for too many entries, and for names or digests that occur twice."""
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"--api-keys-file {path}: {len(entries)} keys are more than the {MAX_KEYS} that are accepted")
    names: set[str] = set()
    digests: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise ConfigError(f"--api-keys-file {path}: the name {entry.name} occurs twice")
        for digest in entry.sha256:
            if digest in digests:
                raise ConfigError(f"--api-keys-file {path}: a key of {entry.name} occurs twice")
            digests.add(digest)
        names.add(entry.name)
