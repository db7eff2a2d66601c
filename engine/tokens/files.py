"""Files of a tokenizer, read with a bound on their length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.files import read_bytes

MAX_BYTES = 128 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises: ModelError."""
    if not path.is_file():
        return {}
    content = read_bytes(path, MAX_BYTES)
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
        return read_bytes(path, MAX_BYTES).decode().split("\n")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read as UTF-8: {error}") from None
