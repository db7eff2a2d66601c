"""One holder of API keys: a name, the digests of the keys, what they may do and how much.

A key that `tessera keys add` makes is 256 random bits, so its plain SHA-256 is as safe to store as a slow salted hash
would be: those exist because passwords can be guessed, and these cannot. The check of a request stays a microsecond.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import msgspec

PREFIX = "sk-tessera-"
KEY_BYTES = 32
NO_SLOT = -1

MAX_KEY_NAME = 64
NAME_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9._@-]{{0,{MAX_KEY_NAME - 1}}}$"

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An entry of the keys file.

    Attributes:
        name: in logs and metrics.
        sha256: of the keys, in hexadecimal; two while a key is being replaced by another.
        weight: share of the engine relative to other keys with work waiting.
        max_requests: most requests under way at a time.
        max_sequences: most sequences (prompts times n) under way at a time.
        max_waiting: most sequences in the engine's queue.
        requests_per_minute, tokens_per_minute: over the last 60 seconds; tokens of prompts and completions.
        may_use_priority: `priority` counts among all keys, not among this one's requests alone.
        may_administer: may use the routes that act on the whole server.
    """

    name: Name
    sha256: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=8)]
    weight: Weight = 1.0
    max_requests: Limit | None = None
    max_sequences: Limit | None = None
    max_waiting: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    may_use_priority: bool = False
    may_administer: bool = False


class ApiKey(KeyEntry, frozen=True, kw_only=True, omit_defaults=True):
    """An entry with its place in the memory in which all app processes count its use."""

    slot: int = NO_SLOT


class AcceptedKeys(msgspec.Struct, frozen=True):
    """All keys that a server accepts: plain ones from options, and those of a keys file."""

    plain: tuple[str, ...] = ()
    named: tuple[ApiKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.plain or self.named)


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """As in `KeyEntry.sha256`."""
    return hashlib.sha256(key.encode()).hexdigest()
