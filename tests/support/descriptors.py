"""Descriptors that this process has open."""

from __future__ import annotations

import contextlib
import os

WATCHED = f"/proc/{os.getpid()}/task/"  # a watch of another test's stalls reads them now and then


def num_open() -> int:
    """Descriptors of this process, but for those of watches."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it listed the descriptors
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(not target.startswith(WATCHED) for target in targets)
