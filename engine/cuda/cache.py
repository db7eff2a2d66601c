"""Compiled kernels on disk.

A file is a checksum, the length of a JSON header, the header (the kernels' mangled names) and the
cubin. The checksum covers the key too, so a file that was cut short, damaged or renamed is noticed
and compiled anew. Files appear whole, by renaming, so several processes may share the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HEADER_LENGTH = struct.Struct("<I")
CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Cubin:
    """Machine code of some kernels.

    Attributes:
        code: what the driver loads.
        lowered_names: by C++ expression, the mangled name in the code.
    """

    code: bytes
    lowered_names: dict[str, str]


def default_cache_dir() -> Path:
    """`$TESSERA_CACHE_DIR`, else `tessera` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("TESSERA_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tessera"


class CubinCache:
    """Cubins by key under `folder`; a folder that cannot be written only makes every look-up a miss.

    Attributes: hits, misses: of `load`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hits = 0
        self.misses = 0

    def load(self, key: str) -> Cubin | None:
        """What was stored under `key` (hexadecimal), or None."""
        try:
            cubin = _decode(key, self._path(key).read_bytes())
        except OSError:
            cubin = None
        if cubin is None:
            self.misses += 1
        else:
            self.hits += 1
        return cubin

    def store(self, key: str, cubin: Cubin) -> None:
        """Keep `cubin` under `key` if the folder can be written."""
        path = self._path(key)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=path.stem[:16], suffix=".tmp", dir=path.parent)
            try:
                with open(handle, "wb") as file:
                    file.write(_encode(key, cubin))
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise

    def _path(self, key: str) -> Path:
        return self.folder / "cubin" / f"{key}.cubin"


def _encode(key: str, cubin: Cubin) -> bytes:
    header = json.dumps(cubin.lowered_names).encode()
    body = HEADER_LENGTH.pack(len(header)) + header + cubin.code
    return _checksum(key, body) + body


def _decode(key: str, content: bytes) -> Cubin | None:
    body = content[CHECKSUM_BYTES:]
    if content[:CHECKSUM_BYTES] != _checksum(key, body):
        return None
    (length,) = HEADER_LENGTH.unpack_from(body)
    code_start = HEADER_LENGTH.size + length
    return Cubin(body[code_start:], json.loads(body[HEADER_LENGTH.size : code_start]))


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()
