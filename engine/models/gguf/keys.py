"""Metadata keys that begin with the architecture's name."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from tessera.engine.gguf.metadata import Metadata

MOST = 2**31 - 1
MAX_LAYERS = 1024


class ArchitectureKeys:
    """Checked access to them. Every reader raises ModelError naming the file and the whole key."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.prefix = metadata.string("general.architecture") + "."

    def has(self, key: str) -> bool:
        return self.metadata.has(self.prefix + key)

    def refuse(self, key: str, accepted: str) -> NoReturn:
        self.metadata.refuse(self.prefix + key, accepted)

    def integer(self, key: str, default: int | None = None) -> int:
        """A number, or one for each layer if all are equal; at least 1 where there is no default."""
        name = self.prefix + key
        if self.metadata.is_array(name):
            found = self.metadata.integers(name)
            if not 1 <= len(found) <= MAX_LAYERS or (found != found[0]).any() or not 0 <= found[0] <= MOST:
                self.metadata.refuse(name, "a number, or the same for every layer")
            return int(found[0])
        return self.metadata.integer(name, 1 if default is None else 0, MOST, default)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Of float32, as the shortest decimal that stands for it."""
        return float(str(np.float32(self.metadata.number(self.prefix + key, low, high, default))))

    def boolean(self, key: str) -> bool | None:
        return self.metadata.boolean(self.prefix + key) if self.has(key) else None

    def string(self, key: str, default: str) -> str:
        return self.metadata.string(self.prefix + key, default)
