"""Checks of folders: whether they can be written, how large they are, how much room there is."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tessera.app.cli.cache.units import size
from tessera.app.cli.doctor.check import Check

MIN_FREE = 5 * 10**9  # bytes; a small model


def folder_check(group: str, name: str, folder: Path, advice: str, min_free: int = 0) -> Check:
    """Whether a folder, or the first that exists above it, can be written and has room."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(group, name, "warning", f"{folder} cannot be written: {error.strerror}", advice)
    free = shutil.disk_usage(existing).free
    value = f"{folder}, {size(free)} free"
    if free < min_free:
        return Check(group, name, "warning", value, "make room, or choose another disk")
    return Check(group, name, "ok", value)


def folder_size(folder: Path) -> int:
    """Bytes of all files below it; links count as themselves."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(root, file)).st_size
            except OSError:
                continue
    return total
