"""Kernel sources and the headers that they include, each read and digested once."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from tessera.engine.contract.errors import CompileError
from tessera.engine.cuda.generated import HEADERS

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class SourceFile(NamedTuple):
    """A file's text, its digest, and the headers that it includes itself."""

    text: str
    digest: bytes
    includes: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> SourceFile:
        return cls(text, hashlib.sha256(text.encode()).digest(), tuple(INCLUDE.findall(text)))


class Sources:
    """The files under `folder`, each read once, and headers that are in no file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, SourceFile | None] = {}

    def of(self, file: str) -> dict[str, SourceFile]:
        """The file and all headers that it includes, directly or not, by name, in the order of the names.

        The file's name is relative to `folder`, a header's is what stands in the #include. Raises: CompileError if the
        file cannot be read.
        """
        try:
            found = {file: self._read(file, self._folder / file)}
        except OSError as error:
            raise CompileError(f"the kernel source {file} cannot be read: {error}") from error
        pending = list(found[file].includes)
        while pending:
            name = pending.pop()
            if name not in found and (header := self._header(name)) is not None:
                found[name] = header
                pending += header.includes
        return dict(sorted(found.items()))

    def _header(self, name: str) -> SourceFile | None:
        """None for one of the toolkit's."""
        if name not in self._files:
            path = self._folder / "include" / name
            if name in HEADERS:
                self._files[name] = SourceFile.of(HEADERS[name].text)
            else:
                self._files[name] = SourceFile.of(path.read_text()) if path.is_file() else None
        return self._files[name]

    def _read(self, name: str, path: Path) -> SourceFile:
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = SourceFile.of(path.read_text())
        return found
