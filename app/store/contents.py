"""Contents of files, each under its id: written beside, synced, then renamed, so that a file is whole or absent."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".part"
ABANDONED_AFTER = 24 * 3600.0  # seconds; by then nothing is still being written


class IncomingContent:
    """Content that is being written. Every method may raise OSError."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115  closed by `publish` or `discard`
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)

    def publish(self, content_id: str) -> None:
        """Make it the content of `content_id`, on the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._path, self._folder / content_id)
        _sync_folder(self._folder)

    def discard(self) -> None:
        """Drop it, unless it was published."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


class Contents:
    """A folder of contents. Ids are the server's own; they are looked up in the database before they come here."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder

    def begin(self) -> IncomingContent:
        """Raises OSError."""
        return IncomingContent(self._folder / (secrets.token_hex(16) + SUFFIX), self._folder)

    def path(self, content_id: str) -> Path:
        assert content_id.replace("-", "").replace("_", "").isalnum(), content_id
        return self._folder / content_id

    def link(self, content_id: str, new_id: str) -> None:
        """Make the content of `content_id` that of `new_id` too; either can be removed alone. Raises OSError."""
        try:
            os.link(self.path(content_id), self.path(new_id))
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(self.path(content_id), self.path(new_id))
        # The link has the age of the content: the sweep is not to take it before it has an object.
        os.utime(self.path(new_id))

    def remove(self, *content_ids: str) -> None:
        """Those that are gone already do not matter. Raises OSError."""
        for content_id in content_ids:
            with contextlib.suppress(FileNotFoundError):
                self.path(content_id).unlink()

    def sweep(self, unknown: Callable[[list[str]], Iterable[str]]) -> None:
        """Remove what a crash has left, once it is old: unfinished contents, and those that no object has.

        Args:
            unknown: those of the given ids that no object has.
        """
        before = time.time() - ABANDONED_AFTER
        old: list[str] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before:
                        old.append(entry.name)
        for name in old:
            if name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / name).unlink()
        self.remove(*unknown([name for name in old if not name.endswith(SUFFIX)]))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
