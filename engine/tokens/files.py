"""Files of a tokenizer, read with a bound on their length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.lfs import POINTER_ERROR, is_lfs_pointer

MAX_BYTES = 128 * 2**20


def read_bytes(path: Path) -> bytes:
    """Raises: ModelError naming a file that is too long, a Git LFS pointer or unreadable."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ModelError(f"{path} is longer than {MAX_BYTES} bytes")
    if is_lfs_pointer(content):
        raise ModelError(f"{path} {POINTER_ERROR}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises: ModelError."""
    if not path.is_file():
        return {}
    content = read_bytes(path)
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return parsed


def read_lines(path: Path) -> list[str]:
    """Without their ends. Raises: ModelError."""
    try:
        return read_bytes(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read as UTF-8: {error}") from None
