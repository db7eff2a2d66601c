"""Descriptors that this process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def num_open(folder: Path) -> int:
    """Those of files and folders below `folder`, and of it: others come and go with other tests' threads."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it listed the descriptors
            found += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return found
