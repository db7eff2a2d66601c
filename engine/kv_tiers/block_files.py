"""KV blocks as files in a folder: atomic, with checksums, for one model and one form of the KV cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

FORMAT = 1
MAGIC = b"tessera-kv\n"
SUFFIX = ".kv"
UNFINISHED = "block.new"  # the file that is being written, beside the folders that are scanned
LENGTH_BYTES = 4  # of the header's length, little-endian
MAX_HEADER = 1 << 16  # bytes
HEADER_BYTES = 1024  # of a file beside its block, for the count of bytes; a header of 128 tokens has 700

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BlockHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a block's file.

    Attributes:
        parent: digest of the block before it; for the first of a prefix the salt's.
        salt_digest: of the prefix's salt; the salt itself is not written.
        checksum: SHA-256 of the block.
    """

    digest: bytes
    parent: bytes
    salt_digest: bytes
    token_bytes: bytes
    account: int
    checksum: bytes = b""


class CorruptBlockError(Exception):
    """A file is not what it should be."""


class BlockStore(Protocol):
    """Where blocks are kept: `BlockFiles`, or a fake in tests. Used by one thread for each kind of work."""

    def write(self, header: BlockHeader, block: Bytes) -> None: ...
    def read(self, digest: bytes, block: Bytes) -> BlockHeader: ...
    def remove(self, digest: bytes) -> None: ...
    def scan(self) -> Iterator[BlockHeader]: ...
    def close(self) -> None: ...


class BlockFiles:
    """Files `<first byte>/<digest>.kv` in `folder`, which belongs to this process as long as it lives.

    What an earlier process left there stays, if it was made for the same `form`, which names the model's weights and
    all that the bytes depend on; else it is wiped.

    Raises: OSError, BlockingIOError if another process uses the folder.
    """

    def __init__(self, folder: Path, form: str) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / UNFINISHED).unlink(missing_ok=True)
            self._claim(f"{FORMAT} {form}\n")
        except OSError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self, form: str) -> None:
        described = self.folder / "form"
        with contextlib.suppress(FileNotFoundError):
            if described.read_text(errors="replace") == form:
                return
        self.wipe()
        described.write_text(form)

    def wipe(self) -> None:
        """Remove all blocks; nothing else in the folder is touched."""
        for part in self._parts():
            shutil.rmtree(part)

    def write(self, header: BlockHeader, block: Bytes) -> None:
        """Write a block; another process sees all of it or nothing. Raises: OSError."""
        path = self._path(header.digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        checksum = hashlib.sha256(block.data).digest()
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(header, checksum=checksum))
        temporary = self.folder / UNFINISHED
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
                _write_all(file.fileno(), MAGIC + len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
                _write_all(file.fileno(), block.data)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, digest: bytes, block: Bytes) -> BlockHeader:
        """Fill `block`. Raises: OSError; CorruptBlockError, with `block` in any state."""
        with open(self._path(digest), "rb", buffering=0) as file:
            header = _read_header(file)
            num_read = file.readinto(block.data)
            if num_read != block.nbytes or file.read(1):
                raise CorruptBlockError("the file's length is wrong")
        if header.digest != digest or hashlib.sha256(block.data).digest() != header.checksum:
            raise CorruptBlockError("the checksum is wrong")
        return header

    def remove(self, digest: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(digest).unlink()

    def scan(self) -> Iterator[BlockHeader]:
        """Headers of all blocks, the oldest first; what is no block is removed."""
        found: list[tuple[float, Path]] = []
        for part in self._parts():
            for path in part.iterdir():
                with contextlib.suppress(FileNotFoundError):  # one that is removed meanwhile
                    if path.suffix == SUFFIX:
                        found.append((path.stat().st_mtime, path))
                    else:
                        path.unlink()
        for _, path in sorted(found):
            try:
                with open(path, "rb", buffering=0) as file:
                    header = _read_header(file)
                if path != self._path(header.digest):
                    raise CorruptBlockError("the name is another block's")
            except (OSError, CorruptBlockError):
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            yield header

    def _parts(self) -> list[Path]:
        return [part for part in self.folder.iterdir() if part.is_dir() and len(part.name) == len("00")]

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / (name + SUFFIX)


def _read_header(file: Any) -> BlockHeader:
    start = file.read(len(MAGIC) + LENGTH_BYTES)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + LENGTH_BYTES or length > MAX_HEADER:
        raise CorruptBlockError("it does not begin as a block")
    try:
        return msgspec.msgpack.decode(file.read(length), type=BlockHeader)
    except msgspec.MsgspecError as error:
        raise CorruptBlockError(f"its header cannot be read: {error}") from error


def _write_all(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
