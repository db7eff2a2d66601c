"""Memory that an operation computes in, kept from call to call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LARGEST_KEPT_BYTES = 1 << 26


class Workspace:
    """Fresh memory costs a page fault every 4 KiB, which for small models is most of an operation's time.

    Not for two threads at once.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Uninitialised; its memory is that of the last array of this name, unless it is very large."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > LARGEST_KEPT_BYTES:
            return np.empty(shape, dtype)
        kept = self._kept.get(name)
        if kept is None or kept.size < nbytes:
            # A power of two, so that slowly growing needs do not allocate every time.
            kept = self._kept[name] = np.empty(1 << max(nbytes - 1, 0).bit_length(), np.uint8)
        return kept[:nbytes].view(dtype).reshape(shape)
