"""Reading a model's files with a bound on their length."""

from __future__ import annotations

from pathlib import Path

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.lfs import POINTER_ERROR, is_lfs_pointer


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Raises: ModelError naming a file that is too long, a Git LFS pointer or unreadable."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise ModelError(f"{path} is longer than {max_bytes} bytes")
    if is_lfs_pointer(content):
        raise ModelError(f"{path} {POINTER_ERROR}")
    return content
