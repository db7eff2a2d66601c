"""`tessera keys`: makes, lists and revokes the keys of a keys file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tessera.app.cli.keys_options import ACTIONS, KeysOptions
from tessera.app.keys.api_key import KeyEntry, digest_of, new_key
from tessera.app.keys.keys_file import read_keys_file, write_keys_file
from tessera.engine.contract.errors import ConfigError
from tessera.options.command_options import GivenOptions

SHOWN_DIGITS = 12
SETTINGS = (
    "weight",
    "max_requests",
    "max_sequences",
    "max_waiting",
    "requests_per_minute",
    "tokens_per_minute",
    "may_use_priority",
    "may_administer",
)


def keys_command(given: GivenOptions) -> int:
    """-> exit code. Raises ConfigError: the file or an argument cannot be used."""
    options = given.make(KeysOptions)
    path = Path(options.api_keys_file)
    if options.action not in ACTIONS:
        said = f", not {options.action}" if options.action is not None else ""
        raise ConfigError(f"keys: say what to do: {', '.join(ACTIONS)}{said}")
    if options.action == "list":
        _show(read_keys_file(path))
        return 0
    if options.name is None:
        raise ConfigError(f"keys {options.action}: the NAME of the key's holder is missing")
    if options.action == "add":
        changed = {name: getattr(options, name) for name in SETTINGS if given.source(name) != "default"}
        print(add_key(path, options.name, changed))
        print(f"The key is shown only this once; {path} has its digest.", file=sys.stderr)
    else:
        revoke_key(path, options.name, options.digest or "")
    return 0


def add_key(path: Path, name: str, settings: dict[str, object]) -> str:
    """Add a key to a file and return it; a holder who has one keeps it, so that it can be replaced without a gap.

    Args:
        settings: fields of the entry; those of a known holder that are left out stay.

    Raises:
        ConfigError: the file or the name cannot be used.
    """
    entries = read_keys_file(path) if path.exists() else ()
    key = new_key()
    known = next((entry for entry in entries if entry.name == name), None)
    fields = msgspec.structs.asdict(known) if known is not None else {"name": name, "sha256": ()}
    fields["sha256"] = (*fields["sha256"], digest_of(key))
    try:
        changed = msgspec.convert(fields | settings, KeyEntry)
    except msgspec.ValidationError:
        raise ConfigError(
            f"keys add: {name!r} cannot be a name: up to 64 letters, digits and ._@- are accepted"
        ) from None
    kept = [changed if entry is known else entry for entry in entries]
    write_keys_file(path, kept if known is not None else [*kept, changed])
    return key


def revoke_key(path: Path, name: str, digest: str = "") -> None:
    """Take a holder's keys away, or the one whose digest begins with `digest`.

    Raises:
        ConfigError: the file cannot be used, or has no such key.
    """
    entries = read_keys_file(path)
    known = next((entry for entry in entries if entry.name == name), None)
    if known is None:
        raise ConfigError(f"keys revoke: {path} has no key of {name}")
    rest = tuple(each for each in known.sha256 if not each.startswith(digest))
    if len(rest) == len(known.sha256):
        raise ConfigError(f"keys revoke: no key of {name} has a digest that begins with {digest}")
    kept = [entry for entry in entries if entry is not known or rest]
    if rest:
        kept = [msgspec.structs.replace(entry, sha256=rest) if entry is known else entry for entry in kept]
    write_keys_file(path, kept)


def _show(entries: tuple[KeyEntry, ...]) -> None:
    """One line for each name: digests of its keys, then what is not the default."""
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        digests = ",".join(digest[:SHOWN_DIGITS] for digest in entry.sha256)
        told = {name: getattr(entry, name) for name in SETTINGS if getattr(entry, name) not in (None, False)}
        shown = [name if value is True else f"{name}={value:g}" for name, value in told.items()]
        print(f"{entry.name:<{width}}  {digests}  {' '.join(shown)}")
