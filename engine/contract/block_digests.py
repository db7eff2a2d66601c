"""The chain of hashes by which full blocks of tokens are found in the prefix cache, and requests routed to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

Digest: TypeAlias = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def first_row(short_len: int, max_num_tokens: int) -> int:
    """The row of RoPE's tables for position 0 in a sequence that may reach `max_num_tokens` tokens."""
    return 0 if max_num_tokens <= short_len else short_len


def prefix_salt(rope_row: int, cache_salt: str, adapter: bytes = b"") -> bytes:
    """What keeps apart prefixes of equal tokens: keys depend on RoPE's rows and on the adapter, of which this is the
    digest, empty without one; salts are kept apart on request."""
    mark = b"@" if adapter else b":"
    return b"%d%b%b%b" % (rope_row, mark, adapter, cache_salt.encode("utf-8", "surrogatepass"))


def extend_digests(digests: list[bytes], salt: bytes, blocks: Iterable[bytes], digest: Digest = sha256) -> None:
    """Append the digest of each of `blocks`, token ids in int32: that of the digest before it and the block."""
    parent = digests[-1] if digests else digest(salt)
    for token_bytes in blocks:
        parent = digest(parent + token_bytes)
        digests.append(parent)
